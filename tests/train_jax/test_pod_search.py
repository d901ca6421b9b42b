"""`trm compile-pod --search`: which variants are compiled, and which one is named."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from train_jax.pod.search import Tried, Variant, best, compile_all, lines, smaller_parts, to_json, variants
from train_jax.run.presets import preset

TOPOLOGY: Any = SimpleNamespace(devices=range(4), hbm_bytes=2**30)


def tried(cycles, gib, *variant):
    """A variant with a made-up result."""
    figures = SimpleNamespace(total=SimpleNamespace(cycles=cycles))
    memory, fits = SimpleNamespace(peak=gib * 2**30), gib <= 1
    compiled = SimpleNamespace(memory=memory)
    result: Any = SimpleNamespace(
        topology=TOPOLOGY,
        yardsticks=figures,
        compiled=compiled,
        fits=fits,
        to_json=lambda: {"estimated_cycles": cycles},
    )
    return Tried(Variant(*variant), result)


def test_variants_divide_the_batch():
    config = dataclasses.replace(preset("tiny"), global_batch_size=24)
    assert [(each.remat, each.accumulation_steps) for each in variants(config, 4)] == [
        ("", 1),
        ("", 2),
        ("blocks", 1),
        ("blocks", 2),
    ], "24 examples on 4 devices are no multiple of 4 parts"
    assert {each.global_batch_size for each in variants(config, 4, [24, 30, 48, 48])} == {24, 48}
    changed = variants(config, 4, [48])[-1].of(config)
    assert (changed.global_batch_size, changed.compute.remat, changed.compute.accumulation_steps) == (48, "blocks", 4)


def test_the_fewest_cycles_for_an_example_among_those_that_fit():
    all_tried = [
        tried(100, 0.5, 8, "blocks", 1),
        tried(150, 0.9, 16, "blocks", 2),
        tried(90, 1.5, 8, "", 1),
        Tried(Variant(16, "", 1), None, "the TPU compiler refuses the step: no"),
    ]
    chosen = best(all_tried)
    assert chosen is all_tried[1], "150 cycles for four examples of a device are fewer than 100 for two"
    text = list(lines(all_tried, TOPOLOGY))
    assert text[-1].endswith(
        "1.00 GiB of a device: --global-batch-size 16 --compute.remat blocks --compute.accumulation-steps 2"
    )
    assert [line.split()[1] for line in text[3:6]] == ["yes", "yes", "no"]
    assert text[6].strip() == "no                        --global-batch-size 16: the TPU compiler refuses the step: no"
    figures = to_json(all_tried)
    assert figures["best"] == {"global_batch_size": 16, "remat": "blocks", "accumulation_steps": 2}
    assert [each["fits"] for each in figures["variants"]] == [True, True, False, False]
    assert "refuses" in figures["variants"][3]["refusal"] and figures["variants"][0]["estimated_cycles"] == 100


def test_variants_that_cannot_fit_are_not_compiled():
    """From a batch of 8 with recomputation in four parts on; only one part is tried, too, as it keeps no sum."""
    memory = {(8, "blocks", 4): 1.2, (8, "blocks", 1): 0.9, (8, "", 1): 1.4}
    asked, said = [], []

    def compiled(variant):
        asked.append((variant.global_batch_size, variant.remat, variant.accumulation_steps))
        if asked[-1] == (8, "", 1):
            return Tried(variant, None, "the TPU compiler refuses the step: RESOURCE_EXHAUSTED: Ran out of memory")
        return tried(100, memory.get(asked[-1], 1.6), *asked[-1])

    chosen = [Variant(size, remat, parts) for size in (8, 16) for remat in ("", "blocks") for parts in (1, 2, 4)]
    found = compile_all(chosen, compiled, said.append)
    assert asked == [(8, "blocks", 4), (8, "blocks", 1), (8, "", 1), (16, "blocks", 1)]
    assert [each.variant for each in found] == chosen and [each.variant for each in found if each.fits] == [chosen[3]]
    because = "not compiled, because --global-batch-size 8 --compute.remat blocks --compute.accumulation-steps 4 needs"
    assert found[1].refusal == f"{because} less memory and does not fit"
    assert said[1].endswith("steps 4: 1.20 GiB, does not fit, 0.0 million estimated cycles")


def test_more_parts_while_nothing_fits():
    all_tried = [tried(100, 4, 32, "", 1), tried(100, 3, 32, "blocks", 4), tried(100, 5, 64, "blocks", 4)]
    assert smaller_parts(all_tried, 4) == Variant(32, "blocks", 8)
    assert smaller_parts(all_tried, 8) is None, "a device has four examples, which are no eight parts"
    refused = Tried(Variant(32, "blocks", 8), None, "the TPU compiler refuses the step: RESOURCE_EXHAUSTED: memory")
    assert smaller_parts([*all_tried, refused], 2) == Variant(32, "blocks", 16)
    assert smaller_parts([*all_tried, tried(100, 0.9, 32, "blocks", 8)], 2) is None, "one fits"
    assert smaller_parts([Tried(Variant(32, "blocks", 8), None, "no")], 2) is None


def test_another_refusal_says_nothing_about_memory():
    chosen = [Variant(8, "blocks", 1), Variant(8, "", 1)]
    found = compile_all(chosen, lambda variant: Tried(variant, None, "no"), lambda text: None)
    assert [each.refusal for each in found] == ["no", "no"]


def test_nothing_fits():
    assert best([tried(100, 2, 8, "", 1)]) is None
    assert "no variant fits the 1.00 GiB" in list(lines([tried(100, 2, 8, "", 1)], TOPOLOGY))[-1]
