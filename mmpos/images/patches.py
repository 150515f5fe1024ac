"""Cut pixels into the square patches that a vision encoder takes: in C where it was built, and the same in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.support import native

__all__ = ["ORDERS", "Factors", "cut", "levels", "patchify"]

# Axes of pixels: rows of blocks, patches in a block, rows in a patch, then the same for columns, then channels.
ORDERS = {"raster": (0, 1, 3, 4, 2, 5, 6), "merged": (0, 3, 1, 4, 2, 5, 6)}

Factors = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""What samples are multiplied by, and what is added to the products: one number per colour each."""


def patchify(
    pixels: npt.NDArray[np.uint8], patch: int, merge: int, order: str, normalise: Factors | None
) -> npt.NDArray[Any]:
    """Pixels (h, w, 3) as new patches (n, patch, patch, 3); with normalise float32, times the first, plus the second.

    One copy is made, straight from the pixels, whatever their strides.
    """
    height, width, channels = pixels.shape
    shape = (height * width // patch**2, patch, patch, channels)
    patches = np.empty(shape, np.uint8 if normalise is None else np.float32)
    if cut(pixels, patch, merge, order, None if normalise is None else levels(*normalise), 0, patches):
        return patches
    block = patch * merge
    view = pixels.reshape(height // block, merge, patch, width // block, merge, patch, channels).transpose(
        ORDERS[order]
    )
    patches.reshape(view.shape)[...] = view
    if normalise is not None:
        # A factor per sample of a patch: numpy is slow over rows of three.
        rows = patches.reshape(-1, patch * patch * channels)
        scale, shift = (np.tile(colour, patch * patch) for colour in normalise)
        rows *= scale
        rows += shift
    return patches


def levels(scale: npt.NDArray[np.float32], shift: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(3, 256) what becomes of each level of each colour."""
    return np.arange(256, dtype=np.float32) * scale[:, None] + shift[:, None]


def cut(
    pixels: npt.NDArray[np.uint8],
    patch: int,
    merge: int,
    order: str,
    table: npt.NDArray[np.float32] | None,
    frames: int,
    out: npt.NDArray[Any],
) -> bool:
    """Whether out was filled in C with patches of these pixels, looked up in the table; frames as in pixel_values."""
    core = native.core
    return core is not None and core.patches(pixels, patch, merge if order == "merged" else 1, table, frames, out)
