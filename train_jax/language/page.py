"""The report of a run of a language model."""

from __future__ import annotations

from typing import Any

from train_jax.language.commands import Sample, perplexity_of, printable, read_core, read_samples
from train_jax.language.phase_scores import phase_table
from train_jax.report.run_page import Curve, RunFiles, configuration, render_run


def page(files: RunFiles) -> str:
    """Renders the report of a run of a language model."""
    test = files.held_out_by("bits_per_byte")
    core = read_core(files.folder)
    samples = [Sample(each.name, printable(each.prompt), printable(each.text)) for each in read_samples(files.folder)]
    seq_len = files.config.arch.seq_len
    return render_run(
        "language.html.j2",
        files,
        (Curve("bits per byte", "bits_per_byte"), Curve("loss per token, nats", "loss")),
        unit="tokens",
        unit_size=seq_len,
        groups=configuration(files.config, {"batch_size", "vocab_size"}),
        test=test,
        perplexity=perplexity_of(test["loss"]) if "loss" in test else None,
        tokens_seen=files.steps * files.config.global_batch_size * seq_len,
        compressed=_compressed(test),
        samples=samples,
        phases=phase_table(files),
        core=core,
        core_rows=_core_rows(core),
        check=files.export_check,
    )


def _compressed(test: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows of bits per byte, lowest first; none if the compressors were not applied to the same text."""
    if not test.get("compressed"):
        return []
    values = {"this model": test["bits_per_byte"], **test["compressed"]}
    return [(name, f"{value:.4f}") for name, value in sorted(values.items(), key=lambda item: item[1])]


def _core_rows(core: dict[str, Any] | None) -> list[tuple[str, str, str, str]]:
    return [
        (name, f"{each['items']:,}", f"{each['accuracy']:.4f}", f"{each['centered']:.4f}")
        for name, each in (core or {"tasks": {}})["tasks"].items()
    ]
