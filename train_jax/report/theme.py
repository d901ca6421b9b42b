"""Colours and type of everything drawn here, light and dark, as CSS."""

from typing import NamedTuple

_LIGHT = """
--paper: #ffffff; --card: #f7f7f5; --ink: #1d2025; --soft: #62676f; --rule: #dcdcd6; --grid: #ebebe7;
--s1: #2563c9; --s2: #d0660a; --s3: #23815a; --given: #1d2025; --found: #2563c9;
--wrong: #b3261e; --wrong-tint: #fbdfdc; --changed-tint: #e3ecfb; --good: #23815a;
"""
_DARK = """
--paper: #15171b; --card: #1d2026; --ink: #e8e8e4; --soft: #9ba1ab; --rule: #363b43; --grid: #272b31;
--s1: #7fabff; --s2: #f2a65a; --s3: #63c99a; --given: #f4f4f0; --found: #8fb5ff;
--wrong: #ff8a80; --wrong-tint: #4f2523; --changed-tint: #24324c; --good: #63c99a;
"""


class CellColour(NamedTuple):
    """A colour that fills cells, on light and on dark paper and in a terminal."""

    light: str
    dark: str
    ansi: int
    """Of the 256 colours that terminals know."""


CELLS = {
    "wall": CellColour("#4b5058", "#767d88", 240),
    "path": CellColour("#6aa5f0", "#3f77c4", 75),
    "end": CellColour("#f2b84b", "#b8832a", 215),
    "arc0": CellColour("#1d1f23", "#0b0c0e", 233),
    "arc1": CellColour("#1e7fd6", "#1e7fd6", 32),
    "arc2": CellColour("#e8443a", "#e8443a", 203),
    "arc3": CellColour("#3fae49", "#3fae49", 71),
    "arc4": CellColour("#f4cf26", "#f4cf26", 220),
    "arc5": CellColour("#a3a7ad", "#a3a7ad", 248),
    "arc6": CellColour("#d936a8", "#d936a8", 169),
    "arc7": CellColour("#f28a30", "#f28a30", 208),
    "arc8": CellColour("#7fd3ee", "#7fd3ee", 117),
    "arc9": CellColour("#8f2438", "#8f2438", 88),
}
"""The ten colours of ARC in the order that its puzzles number them: black, blue, red, green, yellow, grey, magenta,
orange, light blue, maroon."""

_LIGHT += " ".join(f"--{name}: {colour.light};" for name, colour in CELLS.items())
_DARK += " ".join(f"--{name}: {colour.dark};" for name, colour in CELLS.items())

COLOURS = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}"
)

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif'

DRAWINGS = f"""
svg {{ font-family: {FONT}; font-variant-numeric: tabular-nums; }}
svg text {{ fill: var(--ink); }}
svg .title {{ font-size: 13px; font-weight: 600; }}
svg .tick {{ font-size: 11px; fill: var(--soft); }}
svg path {{ fill: none; }}
svg .grid {{ stroke: var(--grid); }}
svg .axis {{ stroke: var(--soft); }}
svg .line {{ stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }}
svg path.s1 {{ stroke: var(--s1); }} svg circle.s1 {{ fill: var(--s1); }}
svg path.s2 {{ stroke: var(--s2); }} svg circle.s2 {{ fill: var(--s2); }}
svg path.s3 {{ stroke: var(--s3); }} svg circle.s3 {{ fill: var(--s3); }}
svg path.band {{ fill: var(--soft); opacity: .28; }}
svg .thin {{ stroke: var(--rule); }}
svg .thick {{ stroke: var(--ink); stroke-width: 1.6; stroke-linecap: square; }}
svg text.digit {{ fill: var(--found); }}
svg text.given {{ fill: var(--given); font-weight: 700; }}
svg text.wrong {{ fill: var(--wrong); }}
svg rect.wrong {{ fill: var(--wrong-tint); }}
svg rect.changed {{ fill: var(--changed-tint); }}
svg.board rect {{ shape-rendering: crispEdges; }}
svg rect.heat {{ fill: var(--wrong); }}
svg text.share {{ font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 2.5px; }}
svg .point {{ font-size: 10.5px; fill: var(--soft); }}
svg rect.frame {{ fill: none; stroke: var(--rule); }}
svg rect.mark {{ fill: none; stroke: var(--wrong); stroke-width: 1.6; }}
{"".join(f"svg rect.{name} {{ fill: var(--{name}); }}" + chr(10) for name in CELLS)}"""

PAGE = f"""
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ margin: 0; padding: 3rem 1.25rem 5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 {FONT}; }}
main {{ max-width: 900px; margin: 0 auto; }}
h1 {{ font-size: 2rem; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 .35rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; letter-spacing: -0.005em; margin: 3.2rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--rule); }}
h3 {{ font-size: .95rem; margin: 1.6rem 0 .3rem; }}
p {{ margin: .4rem 0 .8rem; max-width: 44rem; text-wrap: pretty; }}
code {{ font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.sub, .note {{ color: var(--soft); }}
.note {{ font-size: .875rem; }}
.figures {{ display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; margin: 1.8rem 0 0;
  background: var(--card); border: 1px solid var(--rule); border-radius: 8px; overflow: hidden; }}
.figures div {{ padding: .9rem 1.1rem 1rem; box-shadow: 0 0 0 1px var(--rule); }}
@media (max-width: 720px) {{ .figures {{ grid-template-columns: repeat(2, 1fr); }} }}
.figures dt {{ font-size: .8rem; color: var(--soft); }}
.figures dd {{ margin: .1rem 0 0; font-size: 1.45rem; font-weight: 600; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; }}
.figures small {{ display: block; font-size: .78rem; font-weight: 400; letter-spacing: 0; color: var(--soft); }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 2rem 1.6rem;
  margin-top: 1.2rem; }}
.plots svg {{ width: 100%; height: auto; }}
.beside {{ display: flex; flex-wrap: wrap; gap: 1.5rem 2.2rem; align-items: flex-start; margin-top: 1.2rem; }}
.beside > :first-child {{ flex: 1 1 380px; min-width: 0; max-width: 480px; }}
.beside svg {{ width: 100%; height: auto; }}
.strip {{ display: flex; flex-wrap: wrap; gap: 1.4rem 1.15rem; margin-top: 1.1rem; }}
figure {{ margin: 0; }}
figure svg {{ display: block; }}
figure {{ display: table; }}
figcaption {{ display: table-caption; caption-side: bottom; font-size: .82rem; line-height: 1.35;
  padding-top: .35rem; }}
figcaption small {{ font-size: .95em; color: var(--soft); font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: .22rem 1.4rem .22rem 0;
  border-bottom: 1px solid var(--grid); }}
th {{ font-weight: 500; color: var(--soft); }}
td {{ overflow-wrap: anywhere; }}
.numbers th, .numbers td {{ text-align: right; padding: .16rem 0 .16rem 1.4rem; white-space: nowrap; }}
.numbers th:first-child, .numbers td:first-child {{ padding-left: 0; }}
.rules th:first-child, .rules td:first-child {{ text-align: left; white-space: normal; }}
.bar {{ display: inline-block; height: .7em; background: var(--wrong); border-radius: 1px; }}
.numbers td:has(> .bar) {{ text-align: left; padding-left: .8rem; }}
.examples {{ display: flex; flex-wrap: wrap; gap: 1.2rem 2.6rem; }}
.examples p {{ margin: .6rem 0 -.5rem; max-width: 26rem; line-height: 1.35; }}
.examples small {{ color: var(--soft); }}
.columns {{ columns: 2 340px; column-gap: 2.4rem; margin-top: 1rem; }}
.columns section {{ break-inside: avoid; margin-bottom: 1.6rem; }}
.columns h3 {{ margin-top: 0; }}
.columns table {{ width: 100%; }}
.columns th {{ width: 50%; }}
.good, .bad {{ font-weight: 600; }}
.good {{ color: var(--good); }}
.bad {{ color: var(--wrong); }}
@media print {{
  body {{ padding: 0; }}
  h2 {{ break-after: avoid; }}
  .plots svg, .strip, figure {{ break-inside: avoid; }}
}}
"""
