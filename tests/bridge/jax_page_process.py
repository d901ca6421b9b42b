"""Run in a process of its own: the sections of docs/jax.md on eight virtual devices.

python jax_page_process.py OUT.json

Each section has a namespace and a folder of its own. OUT has what its blocks printed, or the package that it lacks.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
import traceback
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def sections():
    """Returns the blocks of each section, (language, text), without those that the page says are not run."""
    page = re.sub(r"^<!-- not run:[^\n]*-->\n```.*?^```$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)[1:]
    blocks = [re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) for text in named[1::2]]
    return dict(zip(named[::2], blocks, strict=True))


def run(blocks):
    """Returns what each block of Python printed, the package that is not installed, or the error."""
    namespace = {"__name__": "documentation"}
    printed = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, (language, code) in enumerate(blocks):
            if language == "python":
                path = Path(f"block{number}.py").absolute()
                path.write_text(code)  # errors of the bridge quote lines
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    try:
                        exec(compile(code, str(path), "exec"), namespace)
                    except ModuleNotFoundError as error:
                        return {"lacks": error.name}
                    except Exception:
                        return {"error": traceback.format_exc()}
                printed.append(out.getvalue())
    return {"printed": printed}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: run(blocks) for name, blocks in sections().items()}))
