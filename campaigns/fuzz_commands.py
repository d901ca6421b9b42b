"""Runs whole commands with wrong arguments, and on damaged files, run folders included.

    python -m campaigns.fuzz_commands [--cases 300] [--seed 0] [--seconds 180]

A case draws a stage of `trm` and a valid command of it, and then damages an argument (its value, its name, its number)
or a file that the command reads (its content, or a pipe, a folder, a link or nothing in its place). The command has to
end within a time, without a traceback; if it is refused, the folder that it ran in is as before, every file with its
time. Prints the results; exits with status 1 if a case ends otherwise.

A start of `trm` takes seconds, so every command runs in a fork of one process that has imported all stages. This
process never computes: a fork of a process with a backend of JAX would hang.
"""

import argparse
import collections
import contextlib
import importlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from campaigns.damage import damage
from train_jax.__main__ import main
from train_jax.plugin import entries

SHORT = "--steps 6 --checkpoint-every-steps 3 --eval-every-steps 3 --wandb disabled"
PUZZLES = f"train tiny --data-dir set --global-batch-size 8 --eval-batch-size 8 {SHORT}"
SMALL = "--arch.seq-len 16 --arch.n-layer 1 --arch.n-head 2 --arch.n-kv-head 1 --arch.n-embd 16"
TEXTS = f"train chat-tiny --data-dir text {SMALL} --global-batch-size 2 --eval-batch-size 2 {SHORT}"
SETUP = (
    "build-data sudoku --size 4 --num-train 24 --num-test 8 --output-dir set",
    "build-data text --source docs --vocab-size 280 --output-dir text",
    f"{PUZZLES} --run-dir run",
    "evaluate run --halt-early",
    "export run",
    f"{TEXTS} --run-dir language",
)
"""Commands that make the valid files, besides those of `write_sources`."""
COMMANDS = {
    "build-data": (
        "build-data sudoku --size 4 --num-train 8 --num-test 4 --seed 1 --output-dir new",
        "build-data sudoku --source tables --num-aug 1 --output-dir new",
        "build-data text --source docs --vocab-size 280 --test-share 0.2 --output-dir new",
        "build-data chat --source talks.jsonl --tokenizer text --output-dir new",
        "build-data inspect set", "build-data inspect text",
    ),
    "tokenizer": (
        "tokenizer train --source docs --vocab-size 280 --output-dir new", "tokenizer evaluate text",
        "tokenizer inspect text --text word --longest 3",
    ),
    "train": (
        f"{PUZZLES} --run-dir new --seed 3", f"{PUZZLES} --run-dir run --steps 8", f"{PUZZLES} --run-dir run",
        f"{PUZZLES} --run-dir new --init-from run", f"{PUZZLES} --run-dir new --compute.choices choices.json",
        f"{PUZZLES} --run-dir new --compute.runner shard_map --compute.load program",
        f"{TEXTS} --run-dir new", f"{TEXTS} --run-dir language",
    ),
    "status": ("status run language", "status . --json"),
    "summary": ("summary run", "summary language"),
    "profile": ("profile run --host 0 --json new.json",),
    "sweep": ("sweep tiny --over optim.lr=1e-4,1e-3 --data-root . --runs-root . --dry-run", "sweep list exp01"),
    "preflight": ("preflight tiny --data-dir set --run-dir new --quick --timeout 60",),
    "prove": ("prove tiny --data-dir set --minutes 0.1 --output new",),
    "compile-pod": ("compile-pod tiny --data-dir set --topology v4:2x2x1 --json new.json",),
    "launch": ("launch --tpu one --zone us-central2-b --max-hours 3 --dry-run -- train tiny", "launch status one"),
    "evaluate": (
        "evaluate run", "evaluate run --halt-early --halt-threshold 0.5", "evaluate run --weights w.safetensors",
        "evaluate run --step 6 --split train --predictions p.npz", "evaluate language",
    ),
    "score": ("score set p.npz --submission new.json",),
    "core": ("core language docs --max-per-task 2 --results new.json",),
    "chat-eval": ("chat-eval language --tasks spelling:2 --max-tokens 2 --results new.json",),
    "solve": ("solve run --index 1", "solve run --file puzzle.txt", "solve run --puzzle 1234341221434321"),
    "generate": (
        "generate language --prompt 1 --max-tokens 3", "generate language --prompts-file prompts.jsonl --max-tokens 3",
    ),
    "chat": ("chat language --max-tokens 3 --temperature 0.5",),
    "serve": ("serve run language --port 0 --slots 2 --context-tokens 16",),
    "bench-generate": ("bench-generate chat-tiny --rows 1 --tokens 2 --prompt-tokens 2 --rounds 1",),
    "export": (
        "export run --output new.safetensors", "export run --step 3 --no-check", "export language --no-check",
        "export language --format huggingface --output new",
    ),
    "report": ("report run --picture new.svg", "report language --price-per-hour 1"),
    "analyze": ("analyze . --output new", "analyze . --metric bits_per_byte --groups exp01"),
}  # fmt: skip
"""Valid commands of each stage, with paths relative to the folder of the case."""
ODD_WORDS = (
    "", " ", "-1", "0", "1e400", "nan", "inf", "1e8", "99999999999999999999", "0x10", "1,2", "[]", "{}", "true", "none",
    "newest", "..", "/dev/null/x", "/proc/self/mem", "set", "run", "docs", "pipe", "x" * 300, "a/" * 2000,
    "\x1b[31m", "caf\udce9", "ä", "--", "-", "*", "a\nb", "gs:/", "gs://", "hf://", "package.module:Class", "os:system",
)  # fmt: skip
MISPLACED = ("a pipe", "a folder", "nothing", "a link to itself", "a link to a device", "an empty file")
SERVING = b"serving at"


def write_sources(folder: Path) -> None:
    """Writes the files that no command makes."""
    for name in ("docs", "tables"):
        (folder / name).mkdir()
    for number in range(40):
        lines = "".join(f"{a} + {number} = {a + number}\n" for a in range(20))
        (folder / "docs" / f"{number}.txt").write_text(lines)
    solved = "123456789456789123789123456214365897365897214897214365531642978642978531978531642"
    for name, shift in (("train", 0), ("test", 1)):
        digits = str.maketrans("123456789", "123456789"[shift:] + "123456789"[:shift])
        answer = solved.translate(digits)
        (folder / "tables" / f"{name}.csv").write_text(
            f"source,question,answer,rating\nmade,.{answer[1:]},{answer},0\n"
        )
    talk = {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}
    (folder / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 20)
    (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n' * 2)
    (folder / "puzzle.txt").write_text("1.34\n3412\n2143\n4321\n")
    (folder / "choices.json").write_text(json.dumps({"platform": "cpu", "choices": {}}))
    (folder / "program").write_bytes(b'trm-program-1\n{"jax": "0"}\nmachine code')
    os.mkfifo(folder / "pipe")


class Machine:
    """Runs commands in forks of this process, each in a session of its own."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        for name in entries("stages"):
            importlib.import_module(entries("stages")[name].target.partition(":")[0])
        for name in ("train_jax.puzzles.page", "train_jax.puzzles.evaluate", "train_jax.run.kernels"):
            importlib.import_module(name)

    def run(self, argv: list[str], folder: Path) -> tuple[int | None, bytes]:
        """Returns the exit status, None if the command did not end in time, and the output."""
        output = folder.with_name("output")
        output.write_bytes(b"")
        # Whoever writes into a pipe waits for a reader; whoever reads one waits for a writer, and there is none.
        readers = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in folder.rglob("*") if path.is_fifo()]
        child = os.fork()
        if not child:
            self._command(argv, folder, output)
        end = time.monotonic() + self._seconds
        status = None
        while status is None and time.monotonic() < end:
            done, code = os.waitpid(child, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
            elif SERVING in output.read_bytes():
                status = 0
            for reader in readers:
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 2**16)
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for reader in readers:
            os.close(reader)
        return status, output.read_bytes()

    def _command(self, argv: list[str], folder: Path, output: Path) -> None:
        os.setsid()
        os.chdir(folder)
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY)):
            os.dup2(os.open(path, flags), number)
        os.dup2(1, 2)
        status = 1
        try:
            status = main(argv)
            sys.stdout.flush()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)


def wrong_argument(words: list[str], rng: random.Random) -> tuple[list[str], str]:
    """Damages one argument of a command; returns the new one and a description."""
    at = rng.randrange(1, len(words))
    kind = rng.choice(["value", "value", "value", "name", "missing", "twice", "swapped", "more"])
    words = list(words)
    if kind == "value":
        values = [i for i in range(1, len(words)) if not words[i].startswith("--")] or [at]
        words[rng.choice(values)] = rng.choice(ODD_WORDS)
    elif kind == "name":
        words[at] = words[at][:-1] or "x"
    elif kind == "missing":
        del words[at]
    elif kind == "twice":
        words.insert(at, words[at])
    elif kind == "swapped":
        other = rng.randrange(1, len(words))
        words[at], words[other] = words[other], words[at]
    else:
        words[at:at] = [
            f"--{rng.choice(['model', 'step', 'seed', 'platform', 'data-dir', 'x'])}",
            rng.choice(ODD_WORDS),
        ]
    return words, kind


def wrong_file(words: list[str], folder: Path, rng: random.Random) -> str:
    """Damages a file that the command reads, or puts something else in its place; returns a description."""
    named = [folder / word for word in words if word and (folder / word).exists() and word != "pipe"]
    target = rng.choice(sorted(named))
    if target.is_dir():
        files = sorted(path for path in target.rglob("*") if path.is_file() and path.name != "pipe")
        plain = [path for path in files if "checkpoints" not in path.parts]
        target = rng.choice(plain if plain and rng.random() < 0.8 else files)
    if rng.random() < 0.7:
        return f"{target.relative_to(folder)}: {damage(target, rng)}"
    kind = rng.choice(MISPLACED)
    target.unlink()
    if kind == "a pipe":
        os.mkfifo(target)
    elif kind == "a folder":
        target.mkdir()
    elif kind.startswith("a link"):
        target.symlink_to(target if kind.endswith("itself") else "/dev/zero")
    elif kind == "an empty file":
        target.touch()
    return f"{target.relative_to(folder)}: {kind}"


def state_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns inode, size and time of every file, by path."""
    return {
        str(path.relative_to(folder)): (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        for path in folder.rglob("*")
        if not (stat := path.lstat()).st_mode & 0o040000
    }


def run_case(machine: Machine, whole: Path, folder: Path, rng: random.Random) -> tuple[str, str, str]:
    """Runs one case; returns its stage, the command with the damage, and the result, of several lines if it is bad."""
    subprocess.run(["cp", "-a", whole, folder], check=True)
    stage = rng.choice(list(COMMANDS))
    words = shlex.split(rng.choice(COMMANDS[stage]))
    reads_files = any((folder / word).exists() for word in words if word)
    if reads_files and rng.random() < 0.5:
        how = wrong_file(words, folder, rng)
    else:
        words, how = wrong_argument(words, rng)
    before = state_of(folder)
    status, output = machine.run(words, folder)
    what = f"trm {shlex.join(words)[:200]!a} ({how})"
    text = output.decode(errors="replace")
    if status is None:
        return stage, what, f"hangs:\n{text[-500:]}"
    if "Traceback (most recent call last)" in text or status < 0:
        return stage, what, f"a traceback, status {status}:\n{text[-3000:]}"
    if status in (0, 1):
        return stage, what, "done" if status == 0 else "status 1"
    after = state_of(folder)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        return stage, what, f"refused, but wrote {', '.join(changed[:8])}:\n{text[-500:]}"
    last = text.strip().splitlines()[-1:]
    if not last or not last[0].startswith("trm: "):
        return stage, what, f"refused without a line, status {status}:\n{text[-500:]}"
    return stage, what, "refused in one line"


def fuzz(cases: int, seed: int, seconds: float, only: int | None = None) -> tuple[collections.Counter, list[str]]:
    """Runs all cases; returns the number of each result by stage, and the failures with their case numbers."""
    results: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = []
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        folder = Path(scratch) / "case"
        os.environ |= {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": f"{scratch}/compiled", "XDG_STATE_HOME": f"{scratch}/state"}
        whole.mkdir()
        write_sources(whole)
        machine = Machine(seconds)
        for line in SETUP:
            status, output = machine.run(shlex.split(line), whole)
            if status:
                raise SystemExit(f"trm {line} ended with status {status}:\n{output.decode()[-2000:]}")
        (whole / "w.safetensors").write_bytes((whole / "run" / "weights.safetensors").read_bytes())
        shutil.copy(whole / "run" / "evaluation" / "test_predictions.npz", whole / "p.npz")
        for case in [only] if only is not None else range(cases):
            rng = random.Random(f"{seed} {case}")
            stage, what, result = run_case(machine, whole, folder, rng)
            shutil.rmtree(folder)
            results[stage, result.split("\n")[0].split(",")[0]] += 1
            if "\n" in result:
                bad.append(f"case {case} of seed {seed}, {what}: {result}")
                print(bad[-1], flush=True)
    return results, bad


def program() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of a command")
    parser.add_argument("--only", type=int, help="run the case with this number")
    options = parser.parse_args()
    started = time.monotonic()
    results, bad = fuzz(options.cases, options.seed, options.seconds, options.only)
    for (stage, result), count in sorted(results.items()):
        print(f"{stage:<15} {result:<24} {count:>5}")
    print(f"{results.total()} cases in {time.monotonic() - started:.0f} s: {len(bad)} failures")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(program())
