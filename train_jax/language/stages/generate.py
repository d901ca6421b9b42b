"""`trm generate RUN_DIR`: continues prompts with a trained language model."""

import dataclasses
import json
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.language.engine import Request
from train_jax.language.generation import TextModel, read_prompts, with_cycles
from train_jax.language.sampling import Sampling
from train_jax.run.restore import restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts with the averaged weights of a language model, until <|bos|> or --max-tokens.

    Every prompt starts after <|bos|>; a model that was trained on instructions reads it as one, and responds. The
    random numbers of a token depend on --seed, the prompt, the number of the sample and the position, so a sample is
    the same alone, among other prompts and on other devices, up to rounding.
    """

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be repeated, and empty."""
    prompts_file: str | None = None
    """File with further prompts: one on each line, or in .jsonl, objects with the field "prompt"; also gs://…"""
    num_samples: Annotated[int, Range(1, 10**6)] = 1
    """Number of samples of each prompt."""
    max_tokens: Annotated[int, Range(1, 10**6)] = 128
    """Largest number of tokens after a prompt."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Divides the logits; 0 chooses the most probable token (greedy)."""
    top_k: Annotated[int, Range(0, 2**24)] = 0
    """Draw from this many of the most probable tokens; 0 for all."""
    top_p: Annotated[float, Range(0, 1, low_excluded=True)] = 1.0
    """Draw from the most probable tokens that together have this probability."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the random numbers."""
    cycles: Annotated[int, Range(0, 1024)] = 0
    """Number of cycles of HRM-Text; 0 for that of the training."""
    batch_size: Annotated[int, Range(1, 10**6)] = 32
    """Largest number of samples that are computed at the same time, on all devices together."""
    devices: Annotated[int, Range(0, 10**6)] = 1
    """Number of devices of this machine; 0 for all."""
    data_dir: str | None = None
    """Folder with tokenizer.json; by default the data set of the run."""
    json: bool = False
    """Print one JSON object for each sample: prompt, sample, text, tokens, finish (stop or length)."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


def main(config: Generate) -> None:
    texts = [*config.prompt, *(read_prompts(config.prompts_file) if config.prompts_file is not None else ())]
    if not texts:
        raise UserError("no prompt; give --prompt TEXT or --prompts-file FILE; --prompt '' is an empty one")
    use_on_one_host(config.platform)
    run = with_cycles(restore(config.run_dir, step=config.step), config.cycles)
    model = TextModel(run, config.data_dir, Devices(config.devices))
    sampling = Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p)
    requests = model.requests(
        texts, num_samples=config.num_samples, max_tokens=config.max_tokens, sampling=sampling, seed=config.seed
    )
    if len(requests) == 1 and not config.json:
        _print_stream(model, texts[0], requests[0])
    else:
        _print_samples(config, model, texts, requests)


def _print_stream(model: TextModel, prompt: str, request: Request) -> None:
    """Prints the tokens of the only sample as they are computed."""
    tokens = model.engine([request]).stream(request)
    print(prompt, end=_between(model), flush=True)
    for text in model.tokenizer.decode_stream(tokens):
        print(text, end="", flush=True)
    print()


def _between(model: TextModel) -> str:
    """Returns the text to print between a prompt and its continuation: a response begins on a line of its own."""
    return "\n" if model.tokenizer.instructions else ""


def _print_samples(config: Generate, model: TextModel, prompts: list[str], requests: list[Request]) -> None:
    for number, row in enumerate(model.complete(requests, batch_size=config.batch_size)):
        prompt = prompts[number // config.num_samples]
        text = model.tokenizer.decode(row.content)
        if config.json:
            record = {"prompt": prompt, "sample": row.request.sample, "text": text, "tokens": row.content}
            print(json.dumps(record | {"finish": row.finish}, ensure_ascii=False), flush=True)
        else:
            place = f"--- prompt {number // config.num_samples + 1}, sample {row.request.sample + 1}"
            print(f"{place}\n{prompt}{_between(model)}{text}", flush=True)
