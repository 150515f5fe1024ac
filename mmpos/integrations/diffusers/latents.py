"""Latents of mixed sizes in one tensor: every image becomes a strip of patches with one frame and one row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.support.checks import counted, integer, integers

__all__ = ["pack_latents", "unpack_latents"]

PatchSize = int | Sequence[int]


def pack_latents(latents: Sequence[Tensor], patch_size: PatchSize, *, batch: bool = False) -> Tensor:
    """Arrange latents of mixed sizes as strips of patches in raster order, for a transformer that cuts patches itself.

    A transformer that cuts latents into patches and flattens them (Wan, HunyuanVideo, Lumina 2) produces the same
    tokens from a strip, in the same order; the positions supply each token's row and column.

    Args:
        latents: tensors of shape (channels, height, width) or (channels, frames, height, width).
        patch_size: side of a patch, or its frames, height and width.
        batch: whether each strip is a row of the batch, padded with zeros on the right; by default, strips are
            concatenated into one row.

    Returns:
        A new tensor of shape (1 or batch, channels, patch height, tokens · patch width); if latents have frames, the
        patch's frames come before its height.

    Raises:
        InvalidInputError: there are no latents, their dimensions or channels differ, or a size is not a multiple of
            the patch.
    """
    if not latents:
        raise InvalidInputError("latents: got none, want at least one")
    dimensions, channels = latents[0].dim(), latents[0].shape[0]
    strips = []
    for i, each in enumerate(latents):
        if each.dim() not in (3, 4) or (each.dim(), each.shape[0]) != (dimensions, channels):
            want = "(channels, height, width) or (channels, frames, height, width), the same for all"
            raise InvalidInputError(f"latents[{i}]: got shape {tuple(each.shape)}, want {want}")
        strips.append(_strip(each, _sides(patch_size, dimensions - 1), f"latents[{i}]"))
    if not batch:
        return torch.cat(strips, -1).unsqueeze(0)
    longest = max(strip.shape[-1] for strip in strips)
    return torch.stack([torch.nn.functional.pad(strip, (0, longest - strip.shape[-1])) for strip in strips])


def unpack_latents(packed: Tensor, sizes: Sequence[Sequence[int]], patch_size: PatchSize) -> list[Tensor]:
    """Convert a transformer's output for strips of patches back to latents.

    Args:
        packed: strips in the layout of ``pack_latents``, one row per size or one row in total.
        sizes: (height, width) or (frames, height, width) of each image, in latents.
        patch_size: side of a patch, or its frames, height and width.

    Raises:
        InvalidInputError: sizes do not match ``packed``.
    """
    dimensions = packed.dim() - 2
    sides = _sides(patch_size, dimensions)
    if dimensions not in (2, 3) or packed.shape[2:-1] != sides[:-1]:
        want = f"(rows, channels, patch frames if there are any, patch height, columns) for the patch {sides}"
        raise InvalidInputError(f"packed: got shape {tuple(packed.shape)}, want {want}")
    for i, size in enumerate(sizes):
        if len(size) != dimensions:
            raise InvalidInputError(f"sizes[{i}]: got {tuple(size)}, want {counted(dimensions, 'number')}")
        _check_sides(size, sides, f"sizes[{i}]")
    widths = [prod(size) // prod(sides) * sides[-1] for size in sizes]
    rows = packed.shape[0]
    if rows == len(sizes) > 1 and max(widths) == packed.shape[-1]:
        strips = [row[..., :width] for row, width in zip(packed, widths, strict=True)]
    elif rows == 1 and sum(widths) == packed.shape[-1]:
        strips = list(packed[0].split(widths, -1))
    else:
        got = f"{counted(len(sizes), 'size')} with {' and '.join(map(str, widths))} columns"
        raise InvalidInputError(f"sizes: got {got}, want the sizes of the strips in shape {tuple(packed.shape)}")
    return [_image(strip, size, sides) for strip, size in zip(strips, sizes, strict=True)]


def _sides(patch_size: PatchSize, dimensions: int) -> tuple[int, ...]:
    if isinstance(patch_size, int):
        side = integer("patch_size", patch_size, minimum=1)
        return (1, side, side)[-dimensions:]
    sides = integers("patch_size", patch_size, minimum=1)
    if len(sides) not in (dimensions, 3):
        raise InvalidInputError(f"patch_size: got {sides}, want one side, or frames, height and width")
    return sides[-dimensions:]


def _check_sides(size: Sequence[int], sides: Sequence[int], name: str) -> None:
    if any(n % side or n < 1 for n, side in zip(size, sides, strict=True)):
        raise InvalidInputError(f"{name}: got size {tuple(size)}, want multiples of the patch {tuple(sides)}")


def _strip(latents: Tensor, sides: Sequence[int], name: str) -> Tensor:
    """Arrange (channels, …) latents as one row of patches, (channels, …, patch height, tokens · patch width)."""
    _check_sides(latents.shape[1:], sides, name)
    n = len(sides)
    for axis, side in enumerate(sides):
        latents = latents.unflatten(1 + 2 * axis, (-1, side))
    # Order: the axes within a patch, then the axes of patches, then the columns within a patch.
    order = [0, *range(2, 2 * n, 2), *range(1, 2 * n, 2), 2 * n]
    return latents.permute(order).flatten(n)


def _image(strip: Tensor, size: Sequence[int], sides: Sequence[int]) -> Tensor:
    """Undo ``_strip``."""
    n = len(sides)
    counts = [extent // side for extent, side in zip(size, sides, strict=True)]
    patches = strip.unflatten(-1, (*counts, sides[-1]))
    order = [0]
    for axis in range(n - 1):
        order += [n + axis, 1 + axis]
    image = patches.permute([*order, 2 * n - 1, 2 * n])
    for axis in range(n):
        image = image.flatten(1 + axis, 2 + axis)
    return image
