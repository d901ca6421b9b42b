"""The report of a run: one HTML file that needs nothing beside it, every figure in it from the files of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from html import escape
from typing import Any

from train_jax.report.boards import strip
from train_jax.report.curves import Series, plot
from train_jax.report.failure_section import failure_section
from train_jax.report.figures import percent, spelled
from train_jax.report.halting_section import halting_section
from train_jax.report.measured import ActSteps, Answers, Measured, by_act_step, first_unsolved, kept, slowest_solved
from train_jax.report.theme import COLOURS, DRAWINGS, PAGE
from train_jax.tasks.puzzles.kinds import kind_of

SIZED_BY_DATA = {"batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers"}
"""Fields of an architecture that the data set and the devices decide: what config.json holds for them is not used."""

_KEY = (
    '<p class="note">Bold: given. Tinted blue: changed in this step. Red: wrong. '
    "Halt: how likely the model holds it to be that its answer is right.</p>\n"
)


def page(measured: Measured) -> str:
    """The whole document."""
    name = measured.folder.path.resolve().name
    body = [
        _header(measured, name),
        _learning(measured),
        _thinking(measured),
        halting_section(measured),
        _failures(measured),
        _export_check(measured),
        _machine(measured),
        _configuration(measured),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}: run report</title>\n<style>\n{COLOURS}{PAGE}{DRAWINGS}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n</body>\n</html>\n"
    )


def _header(measured: Measured, name: str) -> str:
    config, test, machine = measured.config, measured.held_out, measured.machine or {}
    state = "" if measured.finished else " · <strong>not finished</strong>: the newest figures so far"
    scored = "the whole test set" if measured.test is not None else "the last evaluation during training"
    seconds, speed = measured.train_seconds, measured.examples_per_second
    figures = [
        ("exact accuracy, held out", test.get("exact_accuracy"), percent, "puzzles with every cell right"),
        ("token accuracy, held out", test.get("accuracy"), percent, "cells right"),
        ("held-out puzzles", test.get("count"), "{:,.0f}".format, scored),
        ("ARC pass@2", test.get("ARC/pass@2"), percent, "tasks, by vote over the augmentations"),
        ("training time", seconds, spelled, "compilation included, evaluation not"),
        ("optimizer steps", measured.steps or None, "{:,}".format, f"of {config.global_batch_size:,} examples"),
        ("examples per second", speed, "{:,.0f}".format, "median over training"),
        ("parameters", machine.get("parameters"), "{:,}".format, "without the puzzle table"),
        ("devices", machine.get("devices"), str, str(machine.get("processor", ""))),
    ]
    cells = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(show(value))}<small>{escape(note)}</small></dd></div>"
        for what, value, show, note in figures
        if value is not None
    )
    return (
        f'<h1>{escape(name)}</h1>\n<p class="sub">{escape(config.model)} on {escape(config.data_dir)}{state}</p>\n'
        f'<dl class="figures">{cells}</dl>\n'
    )


def _learning(measured: Measured) -> str:
    if not measured.records:
        return ""
    longest = measured.train_seconds or 0
    unit, unit_seconds = next(
        u for u in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if longest >= 3 * u[1] or u[1] == 1
    )
    against = (("step", "steps", 1), ("train_seconds", f"{unit} of training", unit_seconds))

    def series(name: str, key: str, over: str, x_unit: float, colour: int, *, times: float = 1) -> Series:
        points = [(x / x_unit, y * times) for x, y in measured.curve(key, over)]
        return Series(name, points, colour, marks=key.startswith("eval/"))

    def pair(title: str, key: str, **options: Any) -> list[str]:
        times = 100 if "%" in title else 1
        return [
            plot(
                [
                    series("training", f"train/{key}", over, x_unit, 1, times=times),
                    series("held out, averaged weights", f"eval/{key}", over, x_unit, 2, times=times),
                ],
                title=title,
                x_label=label,
                **options,
            )
            for over, label, x_unit in against
        ]

    plots = [
        *pair("exact accuracy, %", "exact_accuracy", y_range=(0, 100)),
        *pair("loss per token", "lm_loss", log_y=True),
        plot([series("", "train/lr", "step", 1, 1)], title="learning rate", x_label="steps"),
        plot([series("", "train/grad_norm", "step", 1, 1)], title="gradient norm", x_label="steps", log_y=True),
    ]
    return (
        "<h2>Learning</h2>\n"
        '<p class="note">Training figures are means over the examples that halted since the line before; held-out '
        "figures are from evaluations with the averaged weights, every puzzle thought about to the halt limit.</p>\n"
        f'<div class="plots">{"".join(plots)}</div>\n'
    )


def _thinking(measured: Measured) -> str:
    answers = measured.answers
    title = "<h2>After each ACT step</h2>\n"
    if answers is None:
        return f'{title}<p class="note">Not shown: {escape(measured.answers_missing)}.</p>\n'
    if answers.first_step > 1:
        reason = f"of a test set as large as this one only the answers after ACT step {answers.first_step} are kept"
        return f'{title}<p class="note">Not shown: {reason}.</p>\n'
    found = by_act_step(answers)
    return title + _act_steps(found) + _puzzles(answers, found)


def _failures(measured: Measured) -> str:
    if measured.answers is None:
        return f'<h2>Where it fails</h2>\n<p class="note">Not shown: {escape(measured.answers_missing)}.</p>\n'
    return failure_section(measured.answers, by_act_step(measured.answers))


def _act_steps(found: ActSteps) -> str:
    steps = range(1, len(found.exact_accuracy) + 1)

    def series(name: str, values: Any, colour: int) -> Series:
        return Series(
            name, [(step, 100 * value) for step, value in zip(steps, values, strict=True)], colour, marks=True
        )

    drawing = plot(
        [series("exact", found.exact_accuracy, 1), series("token", found.token_accuracy, 2)],
        title="accuracy on held-out puzzles, %",
        x_label="ACT steps",
    )
    rows = "".join(
        f"<tr><td>{step}</td><td>{percent(exact)}</td><td>{percent(token)}</td><td>{percent(halting)}</td></tr>"
        for step, exact, token, halting in zip(
            steps, found.exact_accuracy, found.token_accuracy, found.halting, strict=True
        )
    )
    return (
        "<p>The model answers again and again, each ACT step going on from the latents of the one before. "
        '<span class="note">q_halt &gt; 0: the share of the answers that the model holds to be right.</span></p>\n'
        f'<div class="beside">{drawing}<table class="numbers"><thead><tr><th>ACT step</th><th>exact</th>'
        f"<th>token</th><th>q_halt &gt; 0</th></tr></thead><tbody>{rows}</tbody></table></div>\n"
    )


def _puzzles(answers: Answers, found: ActSteps) -> str:
    if kind_of(answers.data) is None:
        return ""
    stayed = int(kept(found.solved).sum())
    of_solved = (
        f"Of the {stayed:,} whose solution was found and kept, the one that took most ACT steps."
        if stayed
        else "Of those solved in the end, none of them at every step since it was found, the one found last."
    )
    parts = []
    for title, example, why in (
        ("A puzzle solved", slowest_solved(found.solved), of_solved),
        (
            "A puzzle not solved",
            first_unsolved(answers, found.solved),
            "The first of the test set that is not solved in the end.",
        ),
    ):
        trace = None if example is None else answers.trace(example)
        if trace is not None:
            key = "" if parts else _KEY
            parts.append(f"<h2>{title}</h2>\n<p>Test puzzle {example}. {why}</p>\n{key}{strip(trace)}\n")
    return "".join(parts)


def _export_check(measured: Measured) -> str:
    check = measured.export_check
    if check is None:
        return ""
    puzzles, agree = int(check["puzzles"]), int(check["agree"])
    verdict = (
        '<span class="good">PyTorch agrees</span>'
        if agree >= 0.999 * puzzles
        else '<span class="bad">PyTorch disagrees</span>'
    )
    more = []
    if "torch_exact_accuracy" in check:
        more.append(f"It solves {percent(check['torch_exact_accuracy'])} of them.")
    if "max_logit_difference" in check:
        more.append(f"Halting logits differ by at most {check['max_logit_difference']:.1e}.")
    share = f" ({percent(agree / puzzles)})" if puzzles else ""
    return (
        f"<h2>The export, checked</h2>\n<p>{verdict}: the exported weights, loaded strictly into the plain PyTorch "
        f"module, give the same answer on {agree:,} of {puzzles:,} puzzles{share}. {' '.join(more)}</p>\n"
    )


def _machine(measured: Measured) -> str:
    machine = measured.machine
    if machine is None:
        return ""
    facts = {name: value for name, value in machine.items() if name not in ("versions", "parameters")}
    return (
        f'<h2>Machine and software</h2>\n<div class="columns">{_table("machine", facts)}'
        f"{_table('versions', machine.get('versions', {}))}</div>\n"
    )


def _configuration(measured: Measured) -> str:
    fields = dataclasses.asdict(measured.config)
    groups = {"run": {name: value for name, value in fields.items() if not isinstance(value, dict)}}
    groups |= {name: value for name, value in fields.items() if isinstance(value, dict)}
    groups["arch"] = {name: value for name, value in groups["arch"].items() if name not in SIZED_BY_DATA}
    if measured.answers is not None:
        groups["test set"] = dataclasses.asdict(measured.answers.data)
    tables = "".join(_table(name, values) for name, values in groups.items())
    return f'<h2>Configuration</h2>\n<div class="columns">{tables}</div>\n'


def _table(name: str, values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(str(k))}</th><td>{escape(_shown(v))}</td></tr>" for k, v in values.items())
    return f"<section><h3>{escape(name)}</h3><table><tbody>{rows}</tbody></table></section>"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)
