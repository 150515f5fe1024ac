"""Cut pixels into patches and normalise them for a vision encoder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.support.checks import Array

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ORDERS", "Factors", "on_device", "patchify", "pixel_values"]


# Axes of pixels: rows of blocks, patches in a block, rows in a patch, then the same for columns, then channels.
ORDERS = {"raster": (0, 1, 3, 4, 2, 5, 6), "merged": (0, 3, 1, 4, 2, 5, 6)}

Factors = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Factors and offsets of the normalisation, each with one number per colour."""

_AT_ONCE = 128
"""Number of patches that are normalised at once, so that intermediate values stay in the processor's cache."""


def patchify(pixels: npt.NDArray[np.uint8], patch: int, merge: int, order: str, normalise: Factors | None) -> Array:
    """Cut pixels (h, w, 3) into new patches (n, patch, patch, 3): uint8, or normalised float32.

    Pixels are copied only once, directly into the patches, whatever their strides.
    """
    height, width, channels = pixels.shape
    shape = (height * width // patch**2, patch, patch, channels)
    patches = np.empty(shape, np.uint8 if normalise is None else np.float32)
    block = patch * merge
    view = pixels.reshape(height // block, merge, patch, width // block, merge, patch, channels).transpose(
        ORDERS[order]
    )
    patches.reshape(view.shape)[...] = view
    if normalise is not None:
        scale, shift = (np.tile(colour, patch) for colour in normalise)  # whole rows are faster than single pixels
        rows = patches.reshape(-1, patch, patch * channels)
        rows *= scale
        rows += shift
    return patches


def pixel_values(patches: Array | Tensor, patch: int, frames: int, scale: Array, shift: Array) -> Array | Tensor:
    """Normalise patches (n, patch, patch, 3) to float32 (n, 3 * frames * patch * patch), as x * scale + shift.

    The result for a torch tensor is a torch tensor on the same device.
    """
    loaded = sys.modules.get("torch")  # a caller that has a tensor has already imported torch
    if not isinstance(patches, np.ndarray if loaded is None else (np.ndarray, loaded.Tensor)):
        raise InvalidInputError(f"patches: got {type(patches).__name__}, want a numpy array or a torch tensor")
    if str(patches.dtype).removeprefix("torch.") != "uint8":
        raise InvalidInputError(f"patches: got {patches.dtype}, want uint8")
    if patches.ndim != 4 or tuple(patches.shape[1:]) != (patch, patch, 3):
        raise InvalidInputError(f"patches: got shape {tuple(patches.shape)}, want (n, {patch}, {patch}, 3)")
    if isinstance(patches, np.ndarray):
        return _on_host(patches, frames, (scale, shift))
    if patches.device.type == "cpu":
        import torch

        return torch.from_numpy(_on_host(patches.numpy(), frames, (scale, shift)))
    return on_device(patches, frames, scale, shift)


def on_device(patches: Tensor, frames: int, scale: Array, shift: Array) -> Tensor:
    """Normalise patches with torch, on the device of the tensor."""
    import torch

    factors, summands = (torch.from_numpy(colour)[:, None, None].to(patches.device) for colour in (scale, shift))
    planes = patches.permute(0, 3, 1, 2) * factors + summands
    return planes[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1)


def _on_host(patches: Array, frames: int, normalise: Factors) -> npt.NDArray[np.float32]:
    count, side, _, colours = patches.shape
    values = np.empty((count, colours, frames, side * side), np.float32)
    scale, shift = (np.repeat(colour[:, None], side * side, axis=1) for colour in normalise)
    for first in range(0, count, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        planes = np.ascontiguousarray(patches[part].reshape(-1, side * side, colours).swapaxes(1, 2)) * scale
        planes += shift
        values[part] = planes[:, :, None]
    return values.reshape(count, colours * frames * side * side)
