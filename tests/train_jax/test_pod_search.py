"""`trm compile-pod --search`: which variants are compiled, and which one is named."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from train_jax.errors import UserError
from train_jax.pod.search import compile_all, lines, variants
from train_jax.run.presets import preset

TOPOLOGY: Any = SimpleNamespace(devices=range(4), hbm_bytes=2**30)
TINY = preset("tiny")


def parts_of(chosen):
    return [(each.global_batch_size, each.compute.remat, each.compute.accumulation_steps) for each in chosen]


def test_variants_divide_the_batch():
    chosen = variants(TINY, 4, [24])
    assert parts_of(chosen) == [(24, "", 1), (24, "", 2), (24, "blocks", 1), (24, "blocks", 2)], (
        "24 examples on 4 devices are no multiple of 4 parts"
    )
    assert {size for size, _, _ in parts_of(variants(TINY, 4, [24, 30, 48, 48]))} == {24, 48}
    config = dataclasses.replace(TINY, compute=dataclasses.replace(TINY.compute, accumulation_steps=8))
    assert (64, "blocks", 8) in parts_of(variants(config, 4, [64])), "that of the run, too"
    with pytest.raises(UserError, match="no batch size of 7, 9 is a multiple of 4 devices"):
        variants(TINY, 4, [7, 9])


def search(figures):
    """Returns the variants of two batch sizes, and the printed lines; `figures`: cycles and GiB, or a refusal."""
    said = []

    def compiled(config):
        found = figures[config.global_batch_size, config.compute.remat]
        if isinstance(found, str):
            raise UserError(found)
        cycles, gib = found
        return {"estimated_cycles": cycles, "memory": {"peak": gib * 2**30}, "fits": gib <= 1, "devices": 4}

    chosen = [each for each in variants(TINY, 4, [8, 16]) if each.compute.accumulation_steps == 1]
    return compile_all(chosen, compiled, said.append), said


def test_the_fewest_cycles_for_an_example_among_those_that_fit():
    refusal = "the TPU compiler refuses the step: no"
    tried, said = search({(8, "blocks"): (100, 0.5), (16, "blocks"): (150, 0.9), (8, ""): (90, 1.5), (16, ""): refusal})
    assert [(each["batch_size"], each["remat"]) for each in tried] == [
        (16, "blocks"),
        (8, "blocks"),
        (8, ""),
        (16, ""),
    ], "150 cycles for four examples of a device are fewer than 100 for two"
    text = list(lines(tried, TOPOLOGY))
    assert text[-1].endswith("1.00 GiB of a device: --global-batch-size 16 --compute.remat blocks")
    assert [line.split()[1] for line in text[3:6]] == ["yes", "yes", "no"]
    assert text[6].strip() == f"no                        --global-batch-size 16: {refusal}"
    assert said[:2] == ["1 of 4: --global-batch-size 8 …", "1.50    no      0.0        0.0 k  --global-batch-size 8"]
    assert [each["fits"] for each in tried] == [True, True, False, False]
    assert tried[3]["refusal"] == refusal and tried[1]["estimated_cycles"] == 100


def test_no_variant_fits():
    tried, _ = search(dict.fromkeys([(8, ""), (8, "blocks"), (16, ""), (16, "blocks")], (100, 2)))
    assert not tried[0]["fits"] and "no variant fits the 1.00 GiB" in list(lines(tried, TOPOLOGY))[-1]
