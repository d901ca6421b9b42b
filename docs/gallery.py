"""Writes docs/examples/gallery.md: each script in examples/ with what `trm check` prints about it.

    python docs/gallery.py [lstm …]     # runs all examples, or these, and keeps the other sections of the page

An example needs its packages (`pip install -e '.[examples]'`); without them the command ends and names the package.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/examples/gallery.md"
STEPS = 20
FEWER_STEPS = {"diffusion": 5, "timm_batchnorm": 5}
"""Examples with large models, which take minutes for a few steps on a CPU."""
HEAD = f"""# Gallery of examples

For readers who look for a script like their own. Each file in `examples/` is plain PyTorch. `trm check` runs its first
steps in PyTorch and in JAX, with the same weights, batches and random draws, and compares losses, weights and
buffers. `trm train` trains the same file ([your own script](../your_script.md)).

```bash
trm check examples/lstm.py --steps {STEPS}
trm train examples/lstm.py --run-dir runs/lstm --steps 300
```

`python docs/gallery.py` writes this page.
"""


def section(path: Path, output: str) -> str:
    """Returns the section of an example: its docstring, and the losses at both ends and the verdict of its check."""
    about = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    losses = [line for line in output.splitlines() if line.startswith("loss of step")]
    shown = "\n".join([*losses[:2], "…", *losses[-1:], output.strip().splitlines()[-1]])
    return f"## [{path.name}](../../examples/{path.name})\n\n{about}\n\n```text\n{shown}\n```\n"


def sections_of(page: str) -> dict[str, str]:
    """Returns the sections of the page by the names of their files."""
    return {
        part.split("]")[0][4:]: part.rstrip("\n") + "\n"
        for part in re.split(r"^(?=## \[)", page, flags=re.MULTILINE)[1:]
    }


def checked(path: Path) -> str:
    words = [sys.executable, "-m", "train_jax", "check", str(path), "--steps", str(FEWER_STEPS.get(path.stem, STEPS))]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{path.name}: {done.stdout.strip().splitlines()[-1]}")
    return done.stdout


def main(names: Sequence[str]) -> None:
    paths = sorted((ROOT / "examples").glob("*.py"))
    sections = sections_of(PAGE.read_text()) if PAGE.exists() else {}
    for path in paths:
        if not names or path.stem in names:
            sections[path.name] = section(path, checked(path))
            PAGE.parent.mkdir(exist_ok=True)
            PAGE.write_text("\n".join([HEAD, *(sections[each.name] for each in paths if each.name in sections)]))


if __name__ == "__main__":
    main(sys.argv[1:])
