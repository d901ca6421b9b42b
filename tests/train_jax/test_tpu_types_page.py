"""The names, chips and hosts in docs/tpu_types.md are those that a launch accepts and counts with."""

import math
import re

import pytest
from support.scripts import ROOT

from train_jax.pods.launch.accelerators import check_type, runtime_of, worker_count

pytestmark = pytest.mark.docs

PAGE = (ROOT / "docs/tpu_types.md").read_text()
ROWS = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)
]


@pytest.mark.parametrize("cells", ROWS, ids=lambda cells: cells[0])
def test_a_row_of_the_page_agrees_with_the_launch(cells):
    chips, v4, v5p, cube, v5e, v6e, flat, hosts_of_cubes, hosts_of_flat = cells
    for names, topology, hosts in (((v4, v5p), cube, hosts_of_cubes), ((v5e, v6e), flat, hosts_of_flat)):
        for name in filter(None, names):
            check_type(name)
            assert worker_count(name) == int(hosts)
            assert math.prod(map(int, topology.split("x"))) == int(chips)
            assert f"`{runtime_of(name)}`" in PAGE
