"""ARC grids on the canvas and their symmetries: names, turns, places, and which examples are equivalent."""

import numpy as np
import pytest

from train_jax.errors import UserError
from train_jax.tasks.puzzles.arc.grid import (
    CELLS,
    Example,
    Places,
    Puzzle,
    Symmetries,
    canonical,
    draw,
    invariant,
    names_of,
    parse_names,
    place,
    placements,
    render,
    sizes_of,
)
from train_jax.tasks.puzzles.symmetries import turned


def test_a_grid_lies_on_the_canvas_with_end_tokens_below_and_to_the_right():
    canvases = placements([np.array([[7, 0, 9], [1, 2, 3]], np.uint8)])[0]
    inside, in_the_last_corner = np.zeros((2, 30, 30), int)
    inside[1:4, 2:6] = [[9, 2, 11, 1], [3, 4, 5, 1], [1, 1, 1, 0]]
    in_the_last_corner[28:, 27:] = [[9, 2, 11], [3, 4, 5]]
    assert (canvases[30 - 1, 30 - 2] == inside).all()
    assert (canvases[30 - 28, 30 - 27] == in_the_last_corner).all()


def test_a_name_tells_the_symmetry_and_nothing_else_is_read_as_one():
    colours = np.array([np.arange(10), [0, 3, 1, 2, 9, 8, 7, 6, 5, 4]], np.uint8)
    symmetries = Symmetries(np.array([0, 6], np.uint8), colours)
    names = names_of("00576224", symmetries)
    assert names == ["00576224", "00576224|||t6|||0312987654"]
    found, again = parse_names(names)
    assert found == ["00576224"] * 2
    assert all((one == two).all() for one, two in zip(symmetries, again, strict=True))
    endings = ("t8|||0123456789", "t1|||0123456788", "t1|||012345678", "b", "t1|||x|||t1|||0123456789")
    for bad in (f"a|||{ending}" for ending in endings):
        with pytest.raises(UserError, match="is invalid, expected NAME or NAME"):
            parse_names([bad])


def test_the_largest_rectangle_of_colours_is_read():
    canvas = np.zeros((5, 30, 30), np.uint8)
    canvas[0, :3, :4] = 5
    canvas[0, 1, 3] = 1  # an end token where there should be a colour: three columns of three are more than four
    canvas[1, 2:, 3:] = 5  # nothing in the corner
    canvas[2] = 11
    canvas[3, :2, :2] = 4
    canvas[3, 0, :4] = 4  # as large as the square; the flatter of the two counts
    canvas[4, :2, :2] = 12  # no colour
    rows, cols = sizes_of(canvas.reshape(5, CELLS))
    assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == [(3, 3), (0, 0), (30, 30), (1, 4), (0, 0)]


def test_places_are_drawn_from_all_that_are_possible():
    """Input 1x2 and output 3x1 under turn 0 and turn 1: rows 0 to 27 and columns 0 to 28, or the other way round."""
    example = Example(np.zeros((1, 2), np.uint8), np.zeros((3, 1), np.uint8))
    turns = np.array([0, 1] * 20_000, np.uint8)
    places = place([example, example], turns, np.random.default_rng(0))
    is_moved = (places.top > 0) | (places.left > 0)
    assert is_moved.sum(axis=1).max() == 1
    for turn, ends in ((0, (27, 28)), (1, (28, 27))):
        for offsets, end in zip(places, ends, strict=True):
            counts = np.bincount(offsets[turns == turn][:, 0], minlength=end + 1)
            # Half of the time the other example is the one that moves.
            assert len(counts) == end + 1
            assert counts[1:].min() > 0.6 * 10_000 / (end + 1)
    symmetries = Symmetries(turns[:4], np.tile(np.arange(10, dtype=np.uint8), (4, 1)))
    tokens = render([example.input], symmetries, Places(np.full((4, 1), 27), np.full((4, 1), 28)))
    assert [tuple(np.argwhere(row.reshape(30, 30) == 2)[0]) for row in tokens] == [(27, 28)] * 4


def only(grid: list[list[int]]) -> Puzzle:
    example = Example(np.array(grid, np.uint8), np.array(grid, np.uint8))
    return Puzzle("only", {"train": [example], "test": [example]})


@pytest.mark.parametrize(
    ("grid", "different"), [([[0]], 1), ([[4]], 9), ([[0, 3]], 4 * 9), ([[1, 0], [0, 0]], 4 * 9), ([[1, 2]], 2 * 9 * 8)]
)
def test_a_puzzle_that_looks_alike_gets_as_many_augmentations_as_there_are(grid, different):
    symmetries = draw(only(grid), 500, np.random.default_rng(0))
    assert len(symmetries.turns) == different
    assert symmetries.turns[0] == 0 and (symmetries.colours[0] == np.arange(10)).all()


def test_symmetries_are_drawn_uniformly():
    puzzle = Puzzle("p", {"train": [Example(np.arange(10, dtype=np.uint8).reshape(2, 5), np.zeros((1, 2), np.uint8))]})
    symmetries = draw(puzzle, 20_000, np.random.default_rng(0))
    assert len(symmetries.turns) == 20_001
    assert np.bincount(symmetries.turns[1:]).min() > 0.9 * 20_000 / 8
    assert (symmetries.colours[:, 0] == 0).all()
    for colour in range(1, 10):
        counts = np.bincount(symmetries.colours[1:, colour], minlength=10)
        assert counts[0] == 0 and counts[1:].min() > 0.9 * 20_000 / 9


def test_examples_that_a_symmetry_relates_are_known_as_the_same():
    rng = np.random.default_rng(0)
    example = Example(*(rng.integers(0, 10, (3, 4), dtype=np.uint8) for _ in range(2)))
    palette = np.array([0, 2, 1, 4, 3, 5, 9, 8, 7, 6], np.uint8)
    key = canonical(example)
    assert key == canonical(Example(*(turned(palette[grid], 7) for grid in example)))
    assert key != canonical(Example(turned(palette[example.input], 7), turned(palette[example.output], 1)))
    assert key != canonical(Example(palette[example.input], example.output))
    assert key != canonical(Example(example.input, example.output.reshape(4, 3)))


def test_the_quick_invariant_is_one():
    rng = np.random.default_rng(1)
    for _ in range(20):
        example = Example(*(rng.integers(0, 10, rng.integers(1, 5, 2), dtype=np.uint8) for _ in range(2)))
        palette = np.concatenate([[0], 1 + rng.permutation(9)]).astype(np.uint8)
        for turn in range(8):
            assert invariant(example) == invariant(Example(*(turned(palette[grid], turn) for grid in example)))
        assert invariant(example) != invariant(Example(example.input, np.vstack([example.output, example.output])))
