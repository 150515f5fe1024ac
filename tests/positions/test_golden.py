"""Compare the exact ids and next positions of every scheme with a golden file written without this library."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import exact, placed

from mmpos import Grid, Scheme, Text, UnsupportedError
from mmpos.schemes import RopeTie, RopeTieFractional, RopeTieLcm, RopeTieV2

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "positions.json").read_text())["cases"]

THREE_AXES: dict[str, Scheme] = {
    "rope-tie": RopeTie(axes=3),
    "rope-tie-fractional": RopeTieFractional(axes=3),
    "rope-tie-lcm": RopeTieLcm(axes=3),
    "rope-tie-v2": RopeTieV2(axes=3),
}


def test_the_golden_file_contains_all_cases() -> None:
    assert len(GOLDEN) == 157


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{case['scheme']}-{i}" for i, case in enumerate(GOLDEN)])
def test_ids_and_next_position_equal_the_golden_file(case: dict[str, Any]) -> None:
    document = [Text(part[1]) if part[0] == "text" else Grid.from_thw(part[1:]) for part in case["document"]]
    scheme = THREE_AXES.get(case["scheme"], case["scheme"]) if case["axes"] == 3 else case["scheme"]
    positions = placed(document, scheme, case["start"])
    ids = [[Fraction(value) for value in axis] for axis in case["position_ids"]]
    assert positions.axes == case["axes"]
    assert exact(positions) == list(zip(*ids, strict=True))
    dense = positions.dense()
    assert dense.dtype == (np.float64 if positions.fractional else np.int32)
    assert dense.tolist() == [[float(value) for value in axis] for axis in ids]
    if case["next_position"] is None:
        with pytest.raises(UnsupportedError):
            _ = positions.next_positions
    else:
        assert positions.next_positions.tolist() == [int(case["next_position"])]
