"""Patches equal those of a plain loop for any size and order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mmpos.images.patches import on_device, patchify, pixel_values
from mmpos.support.checks import Array

SCALE, SHIFT = np.array([0.01, 0.017, 0.02], np.float32), np.array([-1.5, -0.3, 2], np.float32)


def random(*shape: int) -> npt.NDArray[np.uint8]:
    """Draw random pixel levels."""
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def by_loops(pixels: Array, patch: int, merge: int, order: str) -> Array:
    """Cut patches one after another; in merged order, blocks of merge x merge patches follow one another."""
    block = merge if order == "merged" else 1
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    places = [
        (top + y, left + x)
        for top in range(0, rows, block)
        for left in range(0, columns, block)
        for y in range(block)
        for x in range(block)
    ]
    return np.stack([pixels[y * patch : (y + 1) * patch, x * patch : (x + 1) * patch] for y, x in places])


@pytest.mark.parametrize("order", ["raster", "merged"])
@pytest.mark.parametrize(("patch", "merge"), [(14, 2), (16, 2), (1, 1), (2, 3), (5, 2), (33, 1), (3, 8)])
def test_patches_equal_those_of_a_loop(patch: int, merge: int, order: str) -> None:
    planes = random(3, 2 * patch * merge, 3 * patch * merge + 1)
    pixels = planes[:, ::-1, 1:].transpose(1, 2, 0)  # upside down, and rows of a wider image
    want = by_loops(pixels, patch, merge, order)
    got = patchify(pixels, patch, merge, order, None)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, want)
    floats = want.astype(np.float32) * SCALE + SHIFT
    np.testing.assert_array_equal(patchify(pixels, patch, merge, order, (SCALE, SHIFT)), floats)
    for frames in (1, 2, 3):  # one plane per colour, repeated for every frame
        values = np.stack([floats.transpose(0, 3, 1, 2)] * frames, axis=2).reshape(len(want), -1)
        np.testing.assert_array_equal(pixel_values(got, patch, frames, SCALE, SHIFT), values)
        for normalise in (pixel_values, lambda x, _, *others: on_device(x, *others)):  # on the host, on a device
            tensor = normalise(torch.from_numpy(got), patch, frames, SCALE, SHIFT)
            assert isinstance(tensor, torch.Tensor)
            assert torch.equal(tensor, torch.from_numpy(values))


def test_empty_images_have_no_patches() -> None:
    assert patchify(random(0, 28, 3), 14, 2, "merged", None).shape == (0, 14, 14, 3)
    assert pixel_values(random(0, 14, 14, 3), 14, 2, SCALE, SHIFT).shape == (0, 1176)
    assert on_device(torch.zeros(0, 14, 14, 3, dtype=torch.uint8), 2, SCALE, SHIFT).shape == (0, 1176)
