"""Cut pixels into the square patches that a vision encoder takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ORDERS", "patchify"]

# Axes of pixels: rows of blocks, patches in a block, rows in a patch, then the same for columns, then channels.
ORDERS = {"raster": (0, 1, 3, 4, 2, 5, 6), "merged": (0, 3, 1, 4, 2, 5, 6)}


def patchify(
    pixels: npt.NDArray[np.uint8],
    patch: int,
    merge: int,
    order: str,
    normalise: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None,
) -> npt.NDArray[Any]:
    """Pixels (h, w, 3) as new patches (n, patch, patch, 3); with normalise float32, times the first, plus the second.

    One copy is made, straight from the pixels, whatever their strides.
    """
    height, width, channels = pixels.shape
    block = patch * merge
    parts = pixels.reshape(height // block, merge, patch, width // block, merge, patch, channels)
    view = parts.transpose(ORDERS[order])
    patches = np.empty(view.shape, np.uint8 if normalise is None else np.float32)
    patches[...] = view
    if normalise is not None:
        # A factor per sample of a patch: numpy is slow over rows of three.
        rows = patches.reshape(-1, patch * patch * channels)
        scale, shift = (np.tile(colour, patch * patch) for colour in normalise)
        rows *= scale
        rows += shift
    return patches.reshape(-1, patch, patch, channels)
