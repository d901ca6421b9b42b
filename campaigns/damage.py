"""Random damage to files: bytes, JSON structure, rows and cells of tables, arrays."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 9, 10, 31, 2**31, 2**63, 2**64, 10**400, 0.5, 1e400, float("nan"), "", "0",
    "x" * 10_000, "../../etc/passwd", "/etc/passwd", "a/b", "..", "a\x00b", "\n\nTraceback", "\ud800",
    "|||t0|||0123456789", [], {}, [[]], [[[]]], [[0] * 31], [[0]] * 31, [[0, 1], [0]], [[10]], [[-1]], [[True]],
    [["1"]], [[1.0]], [[None]], {"input": [[1]]},
]  # fmt: skip
TRANSFORMS: dict[str, Callable[[np.ndarray, random.Random], Any]] = {
    "type": lambda array, rng: array.astype(rng.choice([np.float32, bool, "U3", np.complex64, "S2", "m8[s]", "M8[s]"])),
    "integer type": lambda array, rng: array.astype(rng.choice([">i2", "<u8", np.int8, np.uint64, ">i8"])),
    "objects": lambda array, rng: array.astype(object),
    "records": lambda array, rng: np.zeros(array.shape, [("a", int), ("b", float)]),
    "cut": lambda array, rng: array[: rng.randrange(len(array))],
    "longer": lambda array, rng: np.concatenate([array, array]),
    "narrower": lambda array, rng: array[..., : rng.randrange(array.shape[-1])],
    "order": lambda array, rng: array[::-1],
    "columns first": lambda array, rng: np.asfortranarray(array),
    "axes": lambda array, rng: array[None],
    "scalar": lambda array, rng: np.array(rng.choice([0, -1, 2**40])),
    "none": lambda array, rng: array[:0],
    "one value": lambda array, rng: with_value(array, rng, [-1, 5, 200, 2**31 - 1, -(2**31), 2**62]),
    "all values": lambda array, rng: np.full_like(array, rng.randrange(100)),
}


def with_value(array: np.ndarray, rng: random.Random, values: list[int]) -> np.ndarray:
    array = array.astype(np.int64)
    array.flat[rng.randrange(array.size)] = rng.choice(values)
    return array


def damage_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Cuts, flips, repeats or overwrites bytes."""
    at = rng.randrange(len(raw) + 1)
    length = rng.choice([1, 2, 8, 100])
    return rng.choice(
        [
            lambda: raw[:at],
            lambda: raw[:at] + bytes(rng.randrange(256) for _ in range(length)) + raw[at + length :],
            lambda: raw[:at] + raw[at + length :],
            lambda: raw[:at] + raw[max(at - length, 0) :],
            lambda: raw[:at] + b"\x00" * length + raw[at:],
            lambda: rng.choice(
                [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe"]
            ),
            lambda: (
                raw[: min(at, 120)] + rng.choice([b"(", b"9" * 30, b"'", b"\n", b"{", b"}", b"-"]) + raw[min(at, 120) :]
            ),
        ]
    )()


def damage_json(raw: bytes, rng: random.Random) -> bytes:
    """Replaces, removes, repeats or renames one node."""
    content = json.loads(raw)
    node = content
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        kind = rng.randrange(4)
        if kind == 0 or (kind == 3 and isinstance(node, list)):
            node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind == 1:
            del node[key]
        elif kind == 2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        elif isinstance(node, dict):
            names = [str(value) for value in ODD_VALUES if isinstance(value, str)]
            node[rng.choice(names)] = copy.deepcopy(node[key]) if kind == 2 else node.pop(key)
        break
    if rng.random() < 0.02:
        content = rng.choice([content, list(content) if isinstance(content, dict) else {}, 3, "x"])
    return json.dumps(content).encode("utf-8", "surrogatepass")


def damage_table(raw: bytes, rng: random.Random) -> bytes:
    """Replaces, removes, repeats, exchanges or quotes a row, a column or a cell."""
    rows = [line.split(b",") for line in raw.split(b"\n")]
    row = rng.randrange(len(rows) - 1)
    column = rng.randrange(len(rows[row]))
    text = rows[row][column]
    at = rng.randrange(len(text) + 1)
    odd = rng.choice(
        [b"", b"\0", b'"', b",", b"\r", b"\n", b"0", b"9", b".", b" ", b"#", b"S", b"o", b"\xff", b"x" * 70_000]
    )
    kind = rng.randrange(8)
    if kind == 0:
        rows[row][column] = text[:at] + odd + text[at + len(odd[:1]) :]
    elif kind == 1:
        rows[row][column] = text[:at] + odd + text[at:]
    elif kind == 2:
        rows[row][column] = odd * rng.choice([1, len(text)])
    elif kind == 3:  # fewer givens or walls: several solutions, another path
        rows[row][column] = text[:at] + rng.choice([b".", b" "]) * (len(text) - at)
    elif kind == 4:
        del rows[row][column]
    elif kind == 5:
        rows[row].insert(column, rng.choice([text, odd]))
    elif kind == 6:
        rows[row], rows[-2] = rows[-2], rows[row]
    else:
        rows.insert(rng.randrange(len(rows)), rows[row])
    return b"\n".join(b",".join(each) for each in rows)


def damage_array(path: Path, rng: random.Random) -> str:
    kind = rng.choice(list(TRANSFORMS))
    array = np.load(path)
    np.save(path, TRANSFORMS[kind](array, rng), allow_pickle=True)
    return kind


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file in place; returns a description of the damage."""
    if rng.random() < 0.02:
        path.unlink()
        if rng.random() < 0.5:
            path.mkdir()
        return "no file"
    if path.suffix == ".npy" and rng.random() < 0.6:
        return "array " + damage_array(path, rng)
    if (path.suffix == ".json" or path.name == "FINISHED") and rng.random() < 0.75:
        path.write_bytes(damage_json(path.read_bytes(), rng))
        return "json"
    if path.suffix == ".jsonl" and rng.random() < 0.75:
        lines = path.read_bytes().splitlines()
        number = rng.randrange(len(lines))
        lines[number] = damage_json(lines[number], rng)
        path.write_bytes(b"\n".join(lines) + b"\n")
        return "json line"
    if path.suffix == ".csv" and rng.random() < 0.75:
        path.write_bytes(damage_table(path.read_bytes(), rng))
        return "table"
    path.write_bytes(damage_bytes(path.read_bytes(), rng))
    return "bytes"
