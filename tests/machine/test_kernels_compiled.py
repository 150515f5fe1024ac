"""Kernels compile ahead of time, without a GPU, to wide, exact code without register spills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import run

pytest.importorskip("triton")

REGISTERS = {"rotate": 72, "cached": 72, "norm": 80, "backward": 128, "store": 96, "rerotate": 96}
"""Register limits of wide kernels; Triton 3.9 uses 62, 48, 71, 128, 76 and 86."""


def assert_exact(counts: dict[str, Any]) -> None:
    """Assert that products and sums are rounded separately, that nothing uses float64, and that no register spills."""
    assert counts["fma"] == 0, counts
    assert counts["float64"] == 0, counts
    assert (counts["divisions_64"] > 0) == ("form=fractions" in counts["case"]), counts  # only fractions divide
    assert counts["spills"] == counts["stack"] == counts["local"] == 0, counts


def assert_wide(counts: dict[str, Any]) -> None:
    assert_exact(counts)
    kernel = counts["kernel"]
    assert counts["loads_128"] >= (2 if kernel == "rerotate" else 4), counts
    assert counts["stores_128"] >= (2 if kernel == "rerotate" else 4), counts
    # Only the stores of the weight gradients' sums are narrower, once per program.
    assert counts["narrow_stores"] <= (4 if kernel == "backward" else 0), counts
    # The threads of a single warp compute the mean of a row.
    assert counts["heads_shared"] == 0 or kernel not in ("norm", "backward"), counts
    assert counts["registers"] <= REGISTERS[kernel], counts


def test_kernels_compile_to_wide_exact_code_without_spills(tmp_path: Path) -> None:
    (counts,) = run("aot_compile.py", "one", TRITON_CACHE_DIR=str(tmp_path))["one"]
    assert_wide(counts)


@pytest.mark.slow
def test_kernels_of_all_shapes_and_for_amd_gpus_compile_to_exact_code_without_spills(tmp_path: Path) -> None:
    facts = run("aot_compile.py", "wide", "narrow", "fused", "amd", TRITON_CACHE_DIR=str(tmp_path))
    for counts in facts["wide"]:
        assert_wide(counts)
    for counts in facts["narrow"]:
        assert_exact(counts)
    assert [counts["fma"] > 0 for counts in facts["fused"]] == [True]  # so the count would show fused instructions
    assert [counts["spills"] for counts in facts["amd"]] == [0, 0, 0]
