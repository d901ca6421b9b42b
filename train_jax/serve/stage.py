"""`trm serve RUN_DIR …`: language models with OpenAI's interface, and a page for them and for puzzle models."""

import dataclasses
import os
import socket
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any

import tyro

from models_torch.ranges import Range
from train_jax.core.state import Arrays
from train_jax.errors import UserError
from train_jax.language.engine import weights_of
from train_jax.language.generation import TextModel, with_cycles
from train_jax.language.phases import PHASES
from train_jax.puzzles.task import PuzzleTask
from train_jax.run.folder import complete_steps
from train_jax.run.presets import preset
from train_jax.run.restore import Restored, restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices
from train_jax.serve.limits import Limits
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True)
class Serve(Limits):
    """Serve language models and puzzle models: a web page at /, OpenAI's interface at /v1, /health and /metrics.

    Only this machine reaches the server, unless --host is another address; then requests need a token, which is the
    value of an environment variable. Language models may call the calculator and, as `sudoku("…")`, the first Sudoku
    model for puzzles of that size. Nothing is written to disk.
    """

    run_dirs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Folders of runs of `trm train`, also gs://bucket/folder: language models, Sudokus and mazes."""
    depth: Annotated[int | None, Range(1, 10**6)] = None
    """Serve the last phase of the run of `trm train --depth N` first."""
    step: str = "newest"
    """Checkpoint: newest, best (with --keep-best), or its step; requests name another one as NAME@STEP."""
    model_name: str | None = None
    """Name of the only model in requests; by default the folder's name."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for all of this machine."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port; 0 for a free one."""
    token_variable: str = "TRM_TOKEN"
    """Environment variable with the token; if it is set, requests need the token everywhere."""
    slots: Annotated[int, Range(1, 10**6)] = 8
    """Answers computed at the same time, on all devices together."""
    context_tokens: Annotated[int, Range(16, 2**24)] = 10240
    """Maximum tokens of a prompt and its answer, at most the positions of the model."""
    cycles: Annotated[int, Range(0, 1024)] = 0
    """Number of cycles of HRM-Text; 0 for the number used in training."""
    devices: Annotated[int, Range(0, 10**6)] = 1
    """Number of devices of this machine; 0 for all."""
    data_dir: str | None = None
    """Folder with tokenizer.json; by default the data set of the run."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


def main(config: Serve) -> None:
    if config.depth is not None:
        config = dataclasses.replace(config, run_dirs=(_run_of_depth(config.depth), *config.run_dirs))
    if not config.run_dirs:
        raise UserError("trm serve needs a run; give folders of runs of `trm train`, or --depth N")
    from train_jax.serve.app import create_app, starting  # these need the extra `serve`, `--help` does not
    from train_jax.serve.connection import answering, server_of
    from train_jax.serve.gate import Gate, is_loopback

    token = os.environ.get(config.token_variable, "")
    if not token and not is_loopback(config.host):
        raise UserError(
            f"--host {config.host} is visible to others, and {config.token_variable} is not set; set it to a secret "
            "token, or use --host 127.0.0.1"
        )
    use_on_one_host(config.platform)
    with _listening(config) as listening:
        gate = Gate(config, token)
        with answering(starting, config, listening):  # a client that comes early hears when to come again
            services = open_services(config, gate)
        app = create_app(gate, services)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"page: {address}/\nserving at {address}/v1", flush=True)
        server_of(app, config, timeout_graceful_shutdown=5).run(sockets=[listening])


def _run_of_depth(depth: int) -> str:
    """Returns the folder of the last phase of a run by depth. Raises `UserError` if there is none."""
    run_dir = preset(f"d{depth}").run_dir
    for phase in (*reversed(PHASES), ""):
        folder = f"{run_dir}-{phase}" if phase else run_dir
        if path_of(folder).is_dir():
            return folder
    raise UserError(f"--depth {depth}: {run_dir} does not exist; train it with `trm train --depth {depth}`")


def _listening(config: Serve) -> socket.socket:
    """Opens the socket before the model is read, so that a wrong address is reported at once."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise UserError(
            f"--host {config.host} --port {config.port}: {error.strerror}; use another address or port"
        ) from None


def open_services(config: Serve, gate: Any) -> Sequence[Any]:
    """Returns the services of all runs, with their programs compiled."""
    from train_jax.serve.language import TextService
    from train_jax.serve.puzzles import Player, PuzzleService, first_solution

    models = []
    players = []
    for name, run_dir in _names(config).items():
        run = restore(run_dir, step=config.step)
        if isinstance(run.task, PuzzleTask):
            players.append(Player(name, run))
            print(f"{name} at step {run.step}: {players[-1].kind.name}s; compiling", flush=True)
            players[-1].warm_up()
        else:
            models.append(_model(config, name, run_dir, with_cycles(run, config.cycles)))
    if config.cycles and not models:
        raise UserError(f"--cycles {config.cycles} is for language models, and no run is of one; omit it")
    sudokus = [player for player in players if player.kind.key.startswith("sudoku")]
    functions = {"sudoku": partial(first_solution, sudokus)} if sudokus else {}
    return [TextService(gate, models, functions), PuzzleService(gate, players)]


def _names(config: Serve) -> dict[str, str]:
    """Returns the folders by the names of their models, which are unique."""
    runs = config.run_dirs
    if config.model_name and len(runs) > 1:
        raise UserError(f"--model-name {config.model_name} is for one run, and {len(runs)} are given; omit it")
    names = [config.model_name or PurePath(run).name for run in runs]
    counts = Counter(names)
    named = {name if counts[name] == 1 else run: run for name, run in zip(names, runs, strict=True)}
    if len(named) < len(runs):
        raise UserError(f"{next(run for run in runs if runs.count(run) > 1)} is given twice; give each run once")
    return named


def _model(config: Serve, name: str, run_dir: str, run: Restored) -> Any:
    from train_jax.serve.language import Model

    model = TextModel(run, config.data_dir, Devices(config.devices))
    engine = model.engine_of(config.slots, min(config.context_tokens, model.positions))
    sizes = f"{engine.slots} answers at a time, {engine.capacity} tokens each"
    print(f"{name} at step {model.step}: {sizes}; compiling", flush=True)
    engine.warm_up(range(1, engine.capacity + 1))
    checkpoints = {step: partial(_weights, run_dir, step) for step in complete_steps(run.folder.checkpoints)}
    card = _card(run, engine.capacity)
    return Model(name, engine, model.tokenizer, limits=config, step=run.step, checkpoints=checkpoints, card=card)


def _card(run: Restored, capacity: int) -> dict[str, str | int]:
    """Returns what the page says about a model."""
    return {
        "Architecture": run.config.model,
        "Parameters": f"{sum(array.size for array in run.objective.params.values()):,}",
        "Trained on": run.config.data_dir,
        "Optimizer steps": f"{run.step:,}",
        "Reads and writes": f"{capacity:,} tokens, at most",
    }


def _weights(run_dir: str, step: int) -> tuple[Arrays, Arrays]:
    run = restore(run_dir, step=step)
    return weights_of(run.objective, run.state)
