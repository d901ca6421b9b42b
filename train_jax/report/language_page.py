"""The report of a run of a language model: one self-contained HTML file, generated from the files of the run."""

from __future__ import annotations

from typing import Any

from train_jax.errors import UserError
from train_jax.report.render import render_document
from train_jax.report.run_files import RunFiles, read_json
from train_jax.report.run_page import Curve, configuration, learning, run_values
from train_jax.tasks.language.commands import ExportCheck, perplexity_of
from train_jax.tasks.language.sample_file import read_samples

CURVES = (Curve("bits per byte", "bits_per_byte"), Curve("loss per token, nats", "loss"))


def page(files: RunFiles) -> str:
    """Renders the whole document."""
    test, core = files.held_out_by("bits_per_byte"), read_json(files.folder.evaluation("core"))
    seq_len = files.config.arch.seq_len
    return render_document(
        "language.html.j2",
        **run_values(files),
        curves=learning(files, CURVES),
        groups=configuration(files.config, {"batch_size", "vocab_size"}),
        unit="tokens",
        unit_size=seq_len,
        test=test,
        perplexity=perplexity_of(test["loss"]) if "loss" in test else None,
        tokens_seen=files.steps * files.config.global_batch_size * seq_len,
        compressed=_compressed(test),
        samples=read_samples(files.folder),
        core=core,
        core_rows=_core_rows(core, files),
        check=None if files.export_check is None else ExportCheck(**files.export_check),
    )


def _compressed(test: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of bits per byte, lowest first; none if the compressors were not applied to the same text."""
    if not test.get("compressed"):
        return []
    values = {"this model": test["bits_per_byte"], **test["compressed"]}
    return [(name, f"{value:.4f}") for name, value in sorted(values.items(), key=lambda item: item[1])]


def _core_rows(core: Any, files: RunFiles) -> list[tuple[str, str, str, str]]:
    if core is None:
        return []
    try:
        return [
            (name, f"{each['items']:,}", f"{each['accuracy']:.4f}", f"{each['centered']:.4f}")
            for name, each in core["tasks"].items()
        ]
    except (KeyError, TypeError, ValueError) as error:
        path = files.folder.evaluation("core")
        raise UserError(f"{path} cannot be read ({error!r}); write it again with `trm core`") from error
