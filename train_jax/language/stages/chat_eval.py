"""`trm chat-eval RUN`: the accuracy of a language run on problems asked as a chat."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.language.chat.evaluation import (
    Answering,
    Score,
    answer_requests,
    categorical_score,
    chat_core,
    figures_of,
    generative_score,
    letter_tokens,
    logits_of,
    save_scores,
)
from train_jax.language.chat.execution import check_sandbox
from train_jax.language.chat.problems import Problems
from train_jax.language.chat.task_names import task_name
from train_jax.language.core_evaluation import DeviceScorer, positions_of_run
from train_jax.language.generation import TextModel, with_cycles
from train_jax.language.sampling import Sampling
from train_jax.run.restore import NEWEST, Restored, restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices
from train_jax.storage.files import check_output, write_text
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True)
class ChatEval:
    """Ask a language run the held-out problems of tasks, as a chat, and count right answers.

    It answers arithmetic and other open problems in its own words and may call the calculator; if the answers are
    letters, it chooses the one with the largest logit. ChatCORE is the mean accuracy over the tasks, on a scale on
    which a random answer has 0. Uses all devices of one process.
    """

    run_dir: Annotated[str, tyro.conf.Positional]
    """Folder of a run of `trm train`, also gs://bucket/folder."""
    tasks: tuple[str, ...] = ("arithmetic:256", "calculator:256", "spelling:256", "counting:256", "identity")
    """Problems, `NAME[,OPTION=VALUE…][@FOLDER][:COUNT]`, as for `trm build-data chat`; also humaneval."""
    step: str = NEWEST
    """Checkpoint: newest, best (of a run with --keep-best), or its step."""
    num_samples: Annotated[int, Range(1, 10**4)] = 1
    """Answers to each problem; pass@k is the probability that one of k is right."""
    temperature: Annotated[float, Range(0, 100)] = 0.0
    """Divides the logits; 0 chooses the most probable token (greedy)."""
    top_k: Annotated[int, Range(0, 2**24)] = 0
    """Draw from this many of the most probable tokens; 0 for all."""
    max_tokens: Annotated[int, Range(1, 10**6)] = 256
    """Maximum number of tokens of an answer."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the problems and of the random numbers."""
    batch_size: Annotated[int, Range(1, 10**6)] = 32
    """Maximum number of answers computed at the same time, on all devices together."""
    cycles: Annotated[int, Range(0, 1024)] = 0
    """Number of cycles of HRM-Text; 0 for the number used in training."""
    data_dir: str | None = None
    """Folder with tokenizer.json; by default the data set of the run."""
    allow_code: bool = False
    """Run programs that the model writes, for humaneval (else left out), in a sandbox of bubblewrap."""
    results: str | None = None
    """Write accuracies and verdicts to this JSON file too."""
    platform: Platform = "auto"
    """Platform to compute on."""


def main(config: ChatEval) -> None:
    if config.results is not None:
        check_output(config.results)
    if config.num_samples > 1 and config.temperature == 0:
        raise UserError(f"--num-samples {config.num_samples} are equal at --temperature 0; use --temperature 1")
    opened = _open(config)
    use_on_one_host(config.platform)
    run = with_cycles(restore(config.run_dir, step=config.step), config.cycles)
    model = TextModel(run, config.data_dir, Devices())
    print(f"{run.folder.path} at step {run.step}, {run.weights}:")
    print(f"  {'task':<40} {'items':>7} {'accuracy':>9} {'centered':>9}")
    scores: dict[str, Score] = {}
    for name, score in _scores(config, run, model, opened):
        scores[name] = score
        print(f"  {name:<40} {len(score.verdicts):>7} {score.accuracy:>9.4f} {score.centered:>9.4f}", flush=True)
    print(f"  {'ChatCORE':<40} {'':>7} {'':>9} {chat_core(scores.values()):>9.4f}")
    save_scores(run, scores)
    if config.results is not None:
        verdicts = {name: score.verdicts for name, score in scores.items()}
        content = {"step": run.step, "tasks": figures_of(scores), "verdicts": verdicts}
        write_text(path_of(config.results), json.dumps(content, indent=1))


def _open(config: ChatEval) -> dict[str, Problems]:
    """Returns the problems of the tasks. Raises `UserError` for those that cannot be asked."""
    opened: dict[str, Problems] = {}
    for text in config.tasks:
        name = task_name(text)
        if name.problems.kind == "dialogue":
            raise UserError(f"--tasks {text} has no right answers; leave it out")
        if name.problems.runs_code:
            if not config.allow_code:
                print(f"{text} is left out: it runs programs that the model writes; --allow-code allows it")
                continue
            check_sandbox()
        problems = name.open("test", seed=config.seed)
        if not len(problems):
            raise UserError(f"--tasks {text} has no problem in the test split; use more data")
        opened[text] = problems
    if not opened:
        raise UserError("no task is left; give --tasks, such as --tasks arithmetic:256 spelling")
    return opened


def _scores(
    config: ChatEval, run: Restored, model: TextModel, opened: dict[str, Problems]
) -> Iterator[tuple[str, Score]]:
    how = Answering(
        num_samples=config.num_samples,
        sampling=Sampling(temperature=config.temperature, top_k=config.top_k),
        max_tokens=config.max_tokens,
        seed=config.seed,
    )
    written = {name: each for name, each in opened.items() if each.kind == "generative"}
    requests = {name: answer_requests(model.tokenizer, each, how) for name, each in written.items()}
    if requests:
        engine = model.engine([each for name in requests for each in requests[name]], batch_size=config.batch_size)
        for name, problems in written.items():
            rows = engine.complete(requests[name])
            yield name, generative_score(model.tokenizer, problems, rows, config.num_samples)
    chosen = {name: each for name, each in opened.items() if name not in written}
    if not chosen:
        return
    letters = letter_tokens(model.tokenizer, chosen.values())
    positions = positions_of_run(run)
    scorer = DeviceScorer(
        run.objective,
        run.state,
        Devices(),
        positions=positions,
        tokens_at_once=run.config.eval_batch_size * run.config.arch.seq_len,
        outputs=logits_of(list(letters.values())),
        both_ways=model.tokenizer.instructions is not None,
    )
    for name, problems in chosen.items():
        yield name, categorical_score(scorer, model.tokenizer, problems, list(letters), positions=positions)
