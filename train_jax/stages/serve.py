"""`trm serve RUN_DIR`: a language model with OpenAI's interface."""

import dataclasses
import os
import socket
from pathlib import PurePath
from typing import Annotated, Any

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.run.restore import restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.chat.engine_thread import warm_up
from train_jax.tasks.language.chat.protocol import Limits
from train_jax.tasks.language.generation import TextModel


@dataclasses.dataclass(frozen=True)
class Serve(Limits):
    """Serve a language model: /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics.

    Only this machine reaches the server, unless --host is another address; then requests need a token, which is the
    value of an environment variable. The calculator answers the calls of the model. Nothing is written to disk.
    """

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step."""
    model_name: str | None = None
    """Name of the model in requests; by default that of the run's folder."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all of this machine."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port; 0 for a free one."""
    token_variable: str = "TRM_TOKEN"
    """Environment variable with the token; if it is set, requests need the token everywhere."""
    slots: Annotated[int, Range(1, 10**6)] = 8
    """Answers that are computed at the same time, on all devices together."""
    context_tokens: Annotated[int, Range(16, 2**24)] = 10240
    """Tokens of a prompt and its answer, at most; no more than the model has positions."""
    devices: Annotated[int, Range(0, 10**6)] = 1
    """Number of devices of this machine; 0 for all."""
    data_dir: str | None = None
    """Folder with tokenizer.json; by default the data set of the run."""
    platform: Platform = "auto"
    """Where to compute; on one host of a TPU pod, auto is the CPU."""


def main(config: Serve) -> None:
    try:
        import uvicorn

        from train_jax.tasks.language.chat.server import create_app, is_loopback
    except ImportError as error:
        raise UserError(
            f"this command needs the package {error.name}; install it with `pip install 'trm-bridge[serve]'`"
        ) from None
    token = os.environ.get(config.token_variable, "")
    if not token and not is_loopback(config.host):
        raise UserError(
            f"--host {config.host} is reached by others, and {config.token_variable} is not set; set it to a secret "
            "token, or use --host 127.0.0.1"
        )
    use_on_one_host(config.platform)
    with _listening(config) as listening:
        app = create_app(open_service(config, token))
        host, port = listening.getsockname()[:2]
        print(f"serving at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        # Without proxy headers, since a client could choose its address by them.
        options: dict[str, Any] = {"log_level": "warning", "access_log": False, "proxy_headers": False}
        uvicorn.Server(uvicorn.Config(app, **options, timeout_graceful_shutdown=5)).run(sockets=[listening])


def _listening(config: Serve) -> socket.socket:
    """Returns a socket before the model is read, so that a wrong address is found at once."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise UserError(
            f"--host {config.host} --port {config.port}: {error.strerror}; use another address or port"
        ) from None


def open_service(config: Serve, token: str) -> Any:
    """Returns the service of a run, with its programs compiled."""
    from train_jax.tasks.language.chat.server import Service

    model = TextModel(restore(config.run_dir, step=config.step), config.data_dir, Devices(config.devices))
    engine = model.engine_of(config.slots, min(config.context_tokens, model.positions))
    name = config.model_name or PurePath(config.run_dir).name
    sizes = f"{engine.slots} answers at a time, {engine.capacity} tokens each"
    print(f"{name} at step {model.step}: {sizes}; compiling", flush=True)
    warm_up(engine)
    return Service(engine, model.tokenizer, model=name, limits=config, token=token)


def cli(argv: list[str]) -> None:
    main(parse(Serve, argv, prog="trm serve"))
