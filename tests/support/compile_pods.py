"""Runs `trm compile-pod` several times in one process, which saves the time of the imports.

python -m support.compile_pods [-- ARGUMENTS …] … prints a line of JSON at the end: the figures of each run. It ends
with the first one that fails.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path

from train_jax.__main__ import main

figures = []
for divides, words in itertools.groupby(sys.argv[1:], lambda word: word == "--"):
    if not divides:
        file = Path(tempfile.mkdtemp()) / "pod.json"
        status = main(["compile-pod", *words, "--json", str(file)])
        if status:
            sys.exit(status)
        figures.append(json.loads(file.read_text()))
print(json.dumps(figures))
