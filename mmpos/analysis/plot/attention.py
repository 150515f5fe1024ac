"""The attention kernel of a patch, from position alone, and its plot: a map of the image, and curves for text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import (
    canvas,
    draw_curves,
    draw_map,
    panel_columns,
    picture_path,
    quiet_axes,
    scheme_styles,
)
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.support.checks import counted, instance, integer

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

    from mmpos.analysis.plot.picture import Picture


MAX_TOKENS = 2**16
"""Maximum number of tokens in a document for which a kernel can be computed."""

Cosines = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Kernel:
    """The attention scores of a patch from position alone: query and key have the same content in all pairs.

    Args:
        label: label in the plot.
        query: row and column of the patch, counted from 0.
        patches: (height, width) scores of the patches of the same frame; 1 at the query.
        before: (tokens,) scores of the run of text before the image, nearest first.
        after: (tokens,) scores of the run of text after the image, nearest first.
    """

    label: str
    query: tuple[int, int]
    patches: Cosines
    before: Cosines
    after: Cosines


def attention_kernel(
    positions: PositionTable, rotary: Rotary, token: int | None = None, label: str | None = None
) -> Kernel:
    """Compute the attention kernel of a patch: its scores for the patches of its image and the text around the image.

    A score is the mean cosine over pairs j, Σ_j cos((p_query − p_key)[axis of j] · inv_freq[j]) / pairs; it is also
    averaged over heads if they have their own axes.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> placed = place(SegmentTable.from_documents([[Text(2), Grid(3, 3), Text(2)]]))
    >>> kernel = attention_kernel(placed, Rotary(head_dim=64))
    >>> kernel.query, bool(np.allclose(kernel.before, kernel.after))
    ((1, 1), True)

    Args:
        positions: a table with one document.
        rotary: frequencies and their axes, which are used exactly; the attention factor is ignored.
        token: index of the patch in the document; None means the middle of the first image, in its middle frame (the
            later of two middles).
        label: label of the kernel; None means the scheme and, with several axes, the allocation.

    Raises:
        InvalidInputError: positions has several documents, no image, a cut image, or axes that differ from those of
            rotary; or the token is not a patch.
        LimitExceededError: positions has more than 65,536 tokens.
    """
    instance("positions", positions, PositionTable, "mmpos.place")
    instance("rotary", rotary, Rotary, "mmpos.rotary.Rotary")
    if positions.num_documents != 1:
        raise InvalidInputError(f"positions: got {counted(positions.num_documents, 'document')}, want 1")
    if positions.num_tokens > MAX_TOKENS:
        raise LimitExceededError(f"positions: got {counted(positions.num_tokens, 'token')}, want at most {MAX_TOKENS}")
    if positions.axes != rotary.axes:
        raise InvalidInputError(f"positions: got {counted(positions.axes, 'axis')}, want {rotary.axes} as in rotary")
    token, segment = _query(positions, token)
    first, height, width = (int(row[segment]) for row in (positions.offset, positions.height, positions.width))
    frame, index = divmod(token - first, height * width)
    ids = positions.dense(dtype=np.float64)
    angles = rotary.pair_ids(ids[:, [token]] - ids) * rotary.inv_freq_array[..., None]
    cosines: Cosines = np.cos(angles).reshape(-1, positions.num_tokens).mean(axis=0)
    patches = cosines[first:][frame * height * width :][: height * width].reshape(height, width)
    before, after = _texts(positions, segment)
    if label is None:
        allocation = rotary.allocation if isinstance(rotary.allocation, str) else "own allocation"
        label = positions.scheme + (f", {allocation}" if positions.axes > 1 else "")
    return Kernel(label, divmod(index, width), patches, cosines[before][::-1], cosines[after])


def _query(positions: PositionTable, token: int | None) -> tuple[int, int]:
    """Return the query token and its segment."""
    is_grid = positions.is_grid
    if not is_grid.any():
        raise InvalidInputError("positions: got no image, want at least one")
    segment = int(is_grid.argmax())
    if token is not None:
        token = integer("token", token, minimum=0, maximum=positions.num_tokens - 1)
        segment = int(np.searchsorted(positions.offset, token, side="right")) - 1
        if not is_grid[segment]:
            raise InvalidInputError(f"token: got {token}, which is text, want a patch of an image")
    first, height, width = (int(row[segment]) for row in (positions.offset, positions.height, positions.width))
    frames, cut = divmod(int(positions.segment_lengths[segment]), height * width)
    if positions.skip[segment] or cut:
        raise InvalidInputError(f"positions: got a cut image at token {first}, want a complete one")
    if token is None:
        token = first + (frames // 2 * height + height // 2) * width + width // 2
    return token, segment


def _texts(positions: PositionTable, segment: int) -> tuple[slice, slice]:
    """Return the tokens of the text directly before and after an image."""
    text = ~(positions.is_grid | positions.is_padding)
    edges = np.append(positions.offset, positions.num_tokens)
    others = np.flatnonzero(~text)
    place = int(others.searchsorted(segment))
    first = others[place - 1] + 1 if place else 0
    last = others[place + 1] if place + 1 < others.size else text.size
    return slice(edges[first], edges[segment]), slice(edges[segment + 1], edges[last])


_MAX_KERNELS = 6


def plot_attention(kernels: Sequence[Kernel], path: str | PathLike[str] | None = None) -> Picture:
    """Draw kernels of the same document: maps side by side with one colour scale, and all curves below them.

    The path, the result and the errors are as for ``plot_positions``.

    Args:
        kernels: 1 to 6 results of ``attention_kernel``.
        path: the file to write; None writes nothing.

    Raises:
        InvalidInputError: there is no kernel.
        LimitExceededError: there are more than 6 kernels.
    """
    target = picture_path(path)
    if isinstance(kernels, Kernel) or not isinstance(kernels, Sequence):
        raise InvalidInputError(f"kernels: got {type(kernels).__name__}, want a list of Kernel")
    if not kernels:
        raise InvalidInputError("kernels: got none, want at least one")
    if len(kernels) > _MAX_KERNELS:
        raise LimitExceededError(f"kernels: got {len(kernels)}, want at most {_MAX_KERNELS}")
    for i, kernel in enumerate(kernels):
        instance(f"kernels[{i}]", kernel, Kernel, "attention_kernel")
    columns = panel_columns(len(kernels))
    rows = -(-len(kernels) // columns)
    tall = 6.6 / columns * max(np.divide(*kernel.patches.shape) for kernel in kernels)
    sides = [side for side in ("before", "after") if any(getattr(kernel, side).size for kernel in kernels)]
    heights = [rows * (min(max(tall, 1.4), 3.2) + 0.8), *([2.9] if sides else [])]
    subtitle = "cosine between the phases of the patch at the cross and of each other token, averaged over pairs"
    with canvas(target, 8.0, sum(heights) + 0.7, "Attention of a patch by position alone") as figure:
        parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)[:, 0]
        parts[0].suptitle(subtitle, x=0.015, ha="left", fontsize=9, color="#555555")
        maps = parts[0].subplots(rows, columns, squeeze=False)
        low = min(float(kernel.patches.min()) for kernel in kernels)
        for axes, kernel in zip(maps.flat, kernels, strict=False):
            image = draw_map(axes, kernel.patches, kernel.query, (low, 1.0))
            axes.set_title(kernel.label, loc="left", fontsize=10)
            axes.set_xlabel("column", fontsize=9)
        for axes in maps.flat[len(kernels) :]:
            axes.set_axis_off()
        maps[0, 0].set_ylabel("row", fontsize=9)
        bar = parts[0].colorbar(image, ax=maps, fraction=0.04)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8.5, length=0, colors="#444444")
        if sides:
            _draw_texts(parts[1], kernels, sides)
    return figure


def _draw_texts(part: SubFigure, kernels: Sequence[Kernel], sides: Sequence[str]) -> None:
    """Draw the curves for text: before the image on the left, nearest last, and after it on the right."""
    panels = part.subplots(1, len(sides), sharey=True, squeeze=False)[0]
    styles = scheme_styles([kernel.label for kernel in kernels])
    for axes, side in zip(panels, sides, strict=True):
        count = max(getattr(kernel, side).size for kernel in kernels)
        curves = [(getattr(kernel, side), kernel.label, style) for kernel, style in zip(kernels, styles, strict=True)]
        quiet_axes(axes)
        draw_curves(axes, np.arange(1, count + 1), curves)
        axes.set_xlim(*((count + 0.5, 0.5) if side == "before" else (0.5, count + 0.5)))
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.set_xlabel(f"tokens {side} the image", fontsize=9)
    panels[0].set_ylabel("mean cosine", fontsize=9)
    if len(sides) == 2:
        panels[1].set_ylabel("the image", fontsize=9, color="#555555")
    if len(kernels) > 1:
        entries = panels[0].get_legend_handles_labels()
        part.legend(*entries, loc="outside upper left", ncols=3, frameon=False, fontsize=9, handlelength=3.2)
