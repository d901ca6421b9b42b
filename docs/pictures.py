"""Makes the pictures of the tutorials from what the commands of the pages print and write.

    python docs/pictures.py [NAME …]       # all of report, script, loop, launch, sweep; some minutes on two cores

Each picture is an SVG of some kilobytes in docs/pictures, which follows the light or dark mode of its reader.
"""

from __future__ import annotations

import csv
import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_jax.report.plots import Series, plot
from train_jax.report.render import COLOURS

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
CHARACTER, LINE, MARGIN = 7.25, 17.0, 14.0
"""Width and height of a character of a terminal, and the margin around the text, in pixels."""
WIDEST = 118
"""Characters of a line of a terminal; the rest of a longer one is left out."""
COLOUR_OF_PART = {"steps": "s1", "compile": "s2", "saving": "s3", "start": "soft", "evaluation": "end"}
"""Colours of the parts of the time of a launch; all others have that of `rule`."""


# ---- drawings


def colours_of_a_picture() -> str:
    """Returns a `<style>` with the colours of reports, in light and dark mode."""
    light = " ".join(f"--{name}: {colour.light};" for name, colour in COLOURS.items())
    dark = " ".join(f"--{name}: {colour.dark};" for name, colour in COLOURS.items())
    modes = f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    fonts = "svg { font-family: system-ui, sans-serif; }"
    fonts += " .terminal { font-family: ui-monospace, monospace; font-size: 12px; }"
    return f"<style>{modes} {fonts} text {{ fill: var(--ink); }} .soft {{ fill: var(--soft); }}</style>"


def picture(body: str, width: float, height: float, label: str) -> str:
    """Returns a whole SVG with a background of its own, so that it can be read on any page."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    paper = f'<rect width="{width:g}" height="{height:g}" rx="6" style="fill: var(--card)"/>'
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{html.escape(label, quote=True)}">'
    return f"{opened}{colours_of_a_picture()}{paper}{body}</svg>\n"


def terminal(command: str, output: str) -> str:
    """Returns a terminal with a command and its output."""
    lines = [f"$ {command}", *(line.rstrip() for line in output.strip("\n").splitlines())]
    lines = [line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…" for line in lines]
    rows = []
    for number, line in enumerate(lines):
        place = f'x="{MARGIN:g}" y="{MARGIN + LINE * (number + 0.75):g}"'
        rows.append(f'<text {place} xml:space="preserve">{html.escape(line)}</text>')
    width = 2 * MARGIN + CHARACTER * max(map(len, lines))
    height = 2 * MARGIN + LINE * len(lines)
    return picture(f'<g class="terminal">{"".join(rows)}</g>', width, height, f"The output of {command}")


def curves(series: Sequence[Series], **options: Any) -> str:
    """Returns a line plot, as those of reports."""
    drawn = plot(series, width=640, height=280, **options)
    placed = str(drawn).replace("<svg ", f'<svg x="{MARGIN:g}" y="{MARGIN:g}" ', 1)
    return picture(placed, 640 + 2 * MARGIN, 280 + 2 * MARGIN, options["title"])


@dataclass(frozen=True)
class Span:
    """A part of the time of a host: its row, its name, its beginning and its length in seconds."""

    row: str
    part: str
    begin: float
    seconds: float


def timeline(spans: Sequence[Span], title: str) -> str:
    """Returns a row of coloured spans for each session or host, below each other, with an axis of seconds."""
    rows = list(dict.fromkeys(span.row for span in spans))
    end = max(span.begin + span.seconds for span in spans)
    left, width, height, top = 110.0, 560.0, 22.0, 52.0
    scale = width / end
    drawn = [f'<text x="{MARGIN:g}" y="24" font-weight="700" font-size="13">{html.escape(title)}</text>']
    for number, row in enumerate(rows):
        y = top + number * (height + 8)
        drawn.append(f'<text x="{MARGIN:g}" y="{y + 15:g}" font-size="12">{html.escape(row)}</text>')
        for span in (each for each in spans if each.row == row):
            colour = COLOUR_OF_PART.get(span.part, "rule")
            box = f'x="{left + scale * span.begin:.1f}" y="{y:g}" width="{max(scale * span.seconds, 0.5):.1f}"'
            name = f"<title>{span.part}: {span.seconds:.1f} s</title>"
            drawn.append(f'<rect {box} height="{height:g}" style="fill: var(--{colour})">{name}</rect>')
    bottom = top + len(rows) * (height + 8)
    drawn += _axis(end, scale, left, bottom) + _legend(spans, left, bottom + 34)
    return picture("".join(drawn), left + width + 2 * MARGIN, bottom + 58, title)


def _axis(end: float, scale: float, left: float, y: float) -> list[str]:
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if end / step <= 10)
    return [
        f'<text class="soft" x="{left + scale * second:.1f}" y="{y + 12:g}" font-size="11">{second} s</text>'
        for second in range(0, int(end) + 1, step)
    ]


def _legend(spans: Iterable[Span], left: float, y: float) -> list[str]:
    drawn = []
    for part in dict.fromkeys(span.part for span in spans):
        colour = COLOUR_OF_PART.get(part, "rule")
        drawn.append(f'<rect x="{left:g}" y="{y:g}" width="12" height="12" style="fill: var(--{colour})"/>')
        drawn.append(f'<text class="soft" x="{left + 17:g}" y="{y + 11:g}" font-size="12">{part}</text>')
        left += 30 + 7 * len(part)
    return drawn


# ---- what the pages show


def blocks_of(page: str) -> list[str]:
    """Returns the Python blocks of a page in their order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


def run(folder: Path, *words: str) -> str:
    """Runs `trm` with these words and returns what it prints."""
    command = [sys.executable, "-m", "train_jax", *words]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"trm {' '.join(words)} ended with {done.returncode}: {done.stdout[-500:]}")
    return done.stdout


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def report(folder: Path) -> str:
    """The report of the bridge about the module of docs/bridge.md."""
    (folder / "mine.py").write_text(blocks_of("bridge.md")[0])
    words = ["-m", "bridge", "verify", "mine:example", "--train", "True"]
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=True)
    first, *rest = done.stdout.splitlines()
    return terminal(f"python {' '.join(words)}", "\n".join([first, *rest[:9], "…", *rest[-1:]]))


def script(folder: Path) -> str:
    """The loss of the script of docs/your_script.md in training and on held-out points."""
    (folder / "spirals.py").write_text(blocks_of("your_script.md")[0])
    fields = ("--steps", "500", "--global-batch-size", "64", "--optim.ema-decay", "0.99", "--eval-every-steps", "50")
    run(folder, "train", "spirals.py", "--run-dir", "runs/spirals", "--wandb", "disabled", *fields)
    lines = lines_of(folder / "runs/spirals/metrics.jsonl")
    trained = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    held_out = [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]
    series = [Series("training", trained), Series("held out, averaged weights", held_out, colour=2, marks=True)]
    return curves(series, title="Loss of spirals.py", x_label="steps")


def loop(folder: Path) -> str:
    """The losses of the loop of docs/from_pytorch.md, in PyTorch and in JAX."""
    names: dict[str, Any] = {}
    for code in blocks_of("from_pytorch.md")[:4]:
        exec(compile(code, "from_pytorch.md", "exec"), names)
    pytorch, ours = (list(enumerate(names[name], start=1)) for name in ("expected", "losses"))
    series = [Series("PyTorch", pytorch), Series("JAX, the same weights and batches", ours, colour=2)]
    return curves(series, title="Loss of the two loops", x_label="steps")


def launch(folder: Path) -> str:
    """The sessions of a rehearsal in which a host is preempted, and the parts of their time."""
    run(folder, "build-data", "sudoku", "--size", "4", "--num-train", "200", "--num-test", "50", "--output-dir", "data")
    fields = ("--data-dir", str(folder / "data"), "--run-dir", str(folder / "run"), "--steps", "300")
    run(ROOT, "launch", "--rehearse", "2x2", "--preempt", "1@20", "--", "train", "tiny", *fields)
    title = "A rehearsal with 2 hosts; one is preempted at step 20, and the run continues"
    return timeline(spans_of(lines_of(folder / "run/events.jsonl")), title)


def spans_of(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Returns the parts of the time of each session of a run; the parts between two events follow one another."""
    first, spans = events[0]["time"], []
    for event in events:
        seconds: Mapping[str, float] = event.get("seconds", {})
        begin = event["time"] - sum(seconds.values()) - first
        for part, length in seconds.items():
            if length >= 0.05:
                spans.append(Span(f"session {event['session']}", part, max(begin, 0.0), length))
            begin += length
    return spans


def sweep(folder: Path) -> str:
    """The accuracy of the study on one core against the learning rate, with three seeds."""
    with (ROOT / "docs/experiments/study/results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["group"] == "exp10" and row["optim.lr_min_ratio"] == "1.0"]
    series = []
    for seed in range(3):
        points = [
            (float(row["optim.lr"]), float(row["final_exact_accuracy"])) for row in rows if row["seed"] == str(seed)
        ]
        series.append(Series(f"seed {seed}", sorted(points), colour=seed + 1, marks=True))
    return curves(series, title="Exact accuracy by learning rate", x_label="learning rate", log_x=True, y_range=(0, 1))


DRAWN: Mapping[str, Callable[[Path], str]] = {
    "report": report,
    "script": script,
    "loop": loop,
    "launch": launch,
    "sweep": sweep,
}


def main(names: Sequence[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in names or DRAWN:
        with tempfile.TemporaryDirectory() as folder:
            text = DRAWN[name](Path(folder))
        (PICTURES / f"{name}.svg").write_text(text)
        sys.stdout.write(f"docs/pictures/{name}.svg: {len(text):,} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1:])
