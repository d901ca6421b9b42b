"""Runs the published TRM builders, sampler and evaluator in separate processes, from a folder that the user gives.

This file only contains the code that calls them. Their command-line library is replaced by a stub, and the download of
their data sets by local tables.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SET_UP = """
import json, sys, time, types
command_line = types.ModuleType("argdantic")
command_line.ArgParser = lambda: types.SimpleNamespace(command=lambda **_: lambda function: function)
sys.modules["argdantic"] = command_line

def peak_bytes():
    # Not getrusage, because a process inherits the peak of its parent there.
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))

def measured(work):
    before, wall = time.process_time(), time.perf_counter()
    found = work()
    report = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - before,
              "peak_bytes": peak_bytes(), "found": found}
    print("\\n" + json.dumps(report))
"""

PROGRAMS = {
    "arc": """
from dataset.build_arc_dataset import DataProcessConfig, convert_dataset
prefix, output, subsets, test_subset, num_aug, seed = sys.argv[1:]
config = DataProcessConfig(input_file_prefix=prefix, output_dir=output, subsets=subsets.split(","),
                           test_set_name=test_subset, num_aug=int(num_aug), seed=int(seed))
measured(lambda: convert_dataset(config))
""",
    "sudoku": """
tables, output, num_aug = sys.argv[1:]
hub = types.ModuleType("huggingface_hub")
hub.hf_hub_download = lambda repo, name, repo_type: tables + "/" + name
sys.modules["huggingface_hub"] = hub
sys.path.insert(0, PUBLISHED + "/dataset")
import build_sudoku_dataset as builder
builder.tqdm = lambda items: items
config = builder.DataProcessConfig(output_dir=output, num_aug=int(num_aug))
measured(lambda: [builder.convert_subset(split, config) for split in ("train", "test")])
""",
    "maze": """
tables, output, augment, ours = sys.argv[1:]
hub = types.ModuleType("huggingface_hub")
hub.hf_hub_download = lambda repo, name, repo_type: tables + "/" + name
sys.modules["huggingface_hub"] = hub
sys.path.insert(0, PUBLISHED + "/dataset")
import build_maze_dataset as builder
builder.preprocess_data(builder.DataProcessConfig(output_dir=output, aug=augment == "True"))
from puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig
config = PuzzleDatasetConfig(seed=0, dataset_paths=[ours], global_batch_size=4, test_set_mode=True,
                             epochs_per_iter=1, rank=0, num_replicas=1)
measured(lambda: sum(size for _, _, size in PuzzleDataset(config, split="test")))
""",
    "augment": """
import numpy as np
sys.modules["huggingface_hub"] = types.SimpleNamespace(hf_hub_download=None)
sys.path.insert(0, PUBLISHED + "/dataset")
import build_sudoku_dataset as builder
given = np.load(sys.argv[1])
boards, solutions = (given[name].reshape(-1, 9, 9) for name in ("puzzles", "solutions"))
measured(lambda: [builder.shuffle_sudoku(*pair) for pair in zip(boards, solutions)] and None)
""",
    "sampler": """
from puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig
directory, batch_size, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = PuzzleDatasetConfig(seed=0, dataset_paths=[directory], global_batch_size=batch_size, test_set_mode=False,
                             epochs_per_iter=10 * batches * batch_size // 1000 + 1, rank=0, num_replicas=1)
iterator = iter(PuzzleDataset(config, split="train"))
for _ in range(batches):
    next(iterator)
measured(lambda: [next(iterator) for _ in range(batches)] and None)
""",
    "vote": """
import torch, numpy as np
import evaluators.arc as arc
from dataset.common import PuzzleDatasetMetadata
directory, predictions, output = sys.argv[1:]
arc.dist = types.SimpleNamespace(gather_object=lambda mine, all, dst, group: all.__setitem__(0, mine))
metadata = PuzzleDatasetMetadata(**json.load(open(directory + "/test/dataset.json")))
found = {name: torch.from_numpy(array) for name, array in np.load(predictions).items()}
batch = {name: found[name] for name in ("inputs", "puzzle_identifiers")}
preds = {name: found[name] for name in ("preds", "q_halt_logits")}
arc._crop(found["inputs"][0].numpy())  # compiled before the clock starts

def vote():
    evaluator = arc.ARC(directory, metadata)
    evaluator.update_batch(batch, preds)
    return evaluator.result(output, 0, 1)

measured(vote)
""",
    "sample": """
import numpy as np
from puzzle_dataset import _sample_batch
given, count, batch_size = np.load(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
rng = np.random.default_rng(0)
order = np.concatenate([rng.permutation(len(given["group_indices"]) - 1) for _ in range(count)])
start, found = 0, []
while len(found) < count:
    start, rows, _ = _sample_batch(rng, order, given["puzzle_indices"], given["group_indices"], start, batch_size)
    found.append(rows)
np.save(sys.argv[2], np.stack(found))
measured(lambda: None)
""",
}
"""The programs that call the published code, by name; arguments are in the order of `sys.argv`."""


def run(published: str | Path, program: str, *arguments: Any) -> dict[str, Any]:
    """Returns `seconds` and `cpu_seconds` of the work, `peak_bytes` of the process, and `found`, the result."""
    folder = str(Path(published).resolve())
    paths = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"PUBLISHED = {folder!r}\n{SET_UP}{PROGRAMS[program]}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the published code failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
