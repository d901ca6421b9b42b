"""`trm preflight NAME`: checks hosts, devices, code, data and run folder before a run, on one machine or on a pod."""

import shutil

from train_jax.command_line import parse
from train_jax.errors import LostProcessError, UserError
from train_jax.pod.launch.gcloud import check_names
from train_jax.pod.preflight.checks import Preflight, one_failure, run_checks
from train_jax.pod.preflight.rows import Result
from train_jax.run.config import RunConfig
from train_jax.run_arguments import parse_run, split_arguments
from train_jax.runtime import backend
from train_jax.runtime.compilation import use_compile_cache
from train_jax.runtime.coordination import place
from train_jax.runtime.processes import join_processes


def main(options: Preflight, config: RunConfig) -> None:
    if bool(options.tpu) != bool(options.zone):
        raise UserError("--tpu and --zone belong together; give both, such as --tpu my-tpu-1 --zone us-central2-b")
    if options.tpu:
        check_names(tpu=options.tpu, zone=options.zone)
    use_compile_cache(config.compute.compile_cache)
    result = _result(options, config)
    if place()[0] == 0:
        width = max(100, shutil.get_terminal_size().columns)
        print(result.to_json() if options.json else "\n".join(result.lines(width, brief=options.brief)))
    if result.failed:
        raise SystemExit(1)


def _result(options: Preflight, config: RunConfig) -> Result:
    choice = backend.choose(config.platform)
    try:
        context = join_processes(config.platform, options.timeout, cpu_devices=config.virtual_devices)
    except LostProcessError as error:
        return one_failure("processes", error)
    except backend.PlatformError as error:
        return one_failure("devices", error)
    with context:
        return run_checks(config, choice, options)


def cli(argv: list[str]) -> None:
    own, rest = split_arguments(argv, Preflight, prog="trm preflight")
    options = parse(Preflight, own, prog="trm preflight")
    main(options, parse_run(rest, prog="trm preflight", description="")[1])
