"""The attention kernel of a patch by its position alone, and its picture: a map of the image, and curves to text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mmpos.analysis.plot.canvas import INK, Style, canvas, picture_path, picture_title, quiet_axes, scheme_styles
from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.rotary import Rotary
from mmpos.support.checks import IntArray, counted, instance, integer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from mmpos.analysis.plot.picture import Picture


MAX_TOKENS = 2**16
"""Most tokens of a document whose kernel is computed."""

Cosines = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Kernel:
    """The scores that a patch gives by position alone: of a query and a key whose content is the same in all pairs.

    Args:
        label: what it is drawn under.
        query: row and column of the patch, from 0.
        patches: (height, width) towards the patches of its own frame; 1 at the query.
        before: (tokens,) towards the run of text before the image, nearest first.
        after: (tokens,) towards the run of text after it, nearest first.
    """

    label: str
    query: tuple[int, int]
    patches: Cosines
    before: Cosines
    after: Cosines


def attention_kernel(
    positions: PositionTable, rotary: Rotary, token: int | None = None, label: str | None = None
) -> Kernel:
    """Compute the mean cosine over pairs from the phase of a patch to those of its image and of the text around it:
    Σ_j cos((p_query − p_key)[axis of j] · inv_freq[j]) / pairs, over the heads too where they have axes of their own.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> placed = place(SegmentTable.from_documents([[Text(2), Grid(3, 3), Text(2)]]))
    >>> kernel = attention_kernel(placed, Rotary(head_dim=64))
    >>> kernel.query, bool(np.allclose(kernel.before, kernel.after))
    ((1, 1), True)

    Args:
        positions: one document.
        rotary: frequencies and their axes; taken exactly, and without the attention factor.
        token: the patch, as an index into the document; None is the middle of the first image, in its middle frame
            (the later one of two middles).
        label: of the kernel; None is the scheme and, with several axes, the allocation.

    Raises:
        InvalidInputError: more than one document, other axes than rotary's, no image, one that is cut, or a token
            that is no patch.
        LimitExceededError: more than 65,536 tokens.
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
    height, width = int(positions.height[segment]), int(positions.width[segment])
    frame, index = divmod(token - int(positions.offset[segment]), height * width)
    first = int(positions.offset[segment]) + frame * height * width
    cosines = _cosines(positions.dense(dtype=np.float64), rotary, token)
    before, after = _runs(positions, segment)
    return Kernel(
        _label(positions, rotary) if label is None else label,
        divmod(index, width),
        cosines[first : first + height * width].reshape(height, width),
        cosines[before][::-1],
        cosines[after],
    )


def _query(positions: PositionTable, token: int | None) -> tuple[int, int]:
    """The token and its segment."""
    is_grid = positions.is_grid
    if not is_grid.any():
        raise InvalidInputError("positions: got no image, want one to look from")
    segment = int(is_grid.argmax())
    if token is not None:
        token = integer("token", token, minimum=0, maximum=positions.num_tokens - 1)
        segment = int(np.searchsorted(positions.offset, token, side="right")) - 1
        if not is_grid[segment]:
            raise InvalidInputError(f"token: got {token}, which is text, want a patch of an image")
    first, height, width = (int(row[segment]) for row in (positions.offset, positions.height, positions.width))
    frames, cut = divmod(int(positions.segment_lengths[segment]), height * width)
    if positions.skip[segment] or cut:
        raise InvalidInputError(f"positions: got an image at token {first} that is cut, want a whole one")
    if token is None:
        token = first + (frames // 2 * height + height // 2) * width + width // 2
    return token, segment


def _cosines(ids: npt.NDArray[np.float64], rotary: Rotary, token: int) -> Cosines:
    """(tokens,) means over pairs, from (axes, tokens) ids."""
    difference = rotary.pair_ids(ids[:, [token]] - ids)
    means: Cosines = np.cos(difference * rotary.inv_freq_array[:, None]).reshape(-1, ids.shape[1]).mean(axis=0)
    return means


def _runs(positions: PositionTable, segment: int) -> tuple[slice, slice]:
    """The tokens of the text segments that touch an image, before and after it."""
    text = ~(positions.is_grid | positions.is_padding)
    first = last = segment
    while first and text[first - 1]:
        first -= 1
    while last + 1 < positions.num_segments and text[last + 1]:
        last += 1
    stops: IntArray = positions.offset + positions.segment_lengths
    here = int(positions.offset[segment]), int(stops[segment])
    return slice(int(positions.offset[first]), here[0]), slice(here[1], int(stops[last]))


def _label(positions: PositionTable, rotary: Rotary) -> str:
    if positions.axes == 1:
        return positions.scheme
    name = rotary.allocation if isinstance(rotary.allocation, str) else "own allocation"
    return f"{positions.scheme}, {name}"


_MAX_KERNELS = 6
# Inches: of the page; of the maps, their margins, and the bar of colours; of the curves.
_WIDTH, _LEFT, _GAP, _BAR, _MAP_TOP, _MAP_BELOW = 8.0, 0.66, 0.42, 0.72, 0.28, 0.46
_TALLEST, _CURVES, _CURVES_TOP, _FOOT, _TITLE, _BAND = 2.9, 2.1, 0.12, 0.5, 0.66, 0.4
_KEY, _LETTER = 0.24, 0.07  # of a line of the legend; of a letter of 10 points


def plot_attention(
    kernels: Sequence[Kernel], path: str | PathLike[str] | None = None, title: str | None = None
) -> Picture:
    """Draw kernels of the same document: maps side by side on one scale of colours, all curves below them.

    Path, result and errors are as for ``plot_positions``.

    Args:
        kernels: 1 to 6, of ``attention_kernel``.
        path: where to write.
        title: above the picture; None says what is drawn.

    Raises:
        InvalidInputError: no kernel.
        LimitExceededError: more kernels than fit a picture.
    """
    target, title = picture_path(path), picture_title(title)
    if isinstance(kernels, Kernel) or not isinstance(kernels, Sequence):
        raise InvalidInputError(f"kernels: got {type(kernels).__name__}, want a list of Kernel")
    if not kernels:
        raise InvalidInputError("kernels: got none, want at least one to draw")
    if len(kernels) > _MAX_KERNELS:
        raise LimitExceededError(f"kernels: got {len(kernels)}, want at most {_MAX_KERNELS}")
    for i, kernel in enumerate(kernels):
        instance(f"kernels[{i}]", kernel, Kernel, "attention_kernel")
    layout = _layout(kernels)
    with canvas(target, _WIDTH, layout.height) as figure:
        _titles(figure, title, layout.height)
        _maps(figure, kernels, layout)
        if layout.curves:
            _curves(figure, kernels, layout.height)
    return figure


@dataclass(frozen=True)
class _Layout:
    """Columns of maps, the inches of a map and of the page, and whether there are curves."""

    columns: int
    width: float
    tall: float
    height: float
    curves: bool


def _layout(kernels: Sequence[Kernel]) -> _Layout:
    columns = min(len(kernels), 2 if len(kernels) in (2, 4) else 3)
    width = (_WIDTH - _LEFT - _BAR - _GAP * (columns - 1)) / columns
    ratios = [kernel.patches.shape[0] / kernel.patches.shape[1] for kernel in kernels]
    tall = min(width * max(ratios), _TALLEST)
    curves = any(kernel.before.size or kernel.after.size for kernel in kernels)
    height = _TITLE - (-len(kernels) // columns) * (_MAP_TOP + tall + _MAP_BELOW)
    height += _CURVES_TOP + _key_lines(kernels) * _KEY + _CURVES + _FOOT if curves else 0.1
    # A map of a tall image is as wide as its name at least.
    width = min(width, max(tall / min(ratios), _LETTER * max(len(kernel.label) for kernel in kernels)))
    return _Layout(columns, width, tall, height, curves)


def _maps(figure: Picture, kernels: Sequence[Kernel], layout: _Layout) -> None:
    """All maps, row by row, and the bar of their colours at the end of the first row."""
    low = min(float(kernel.patches.min()) for kernel in kernels)
    width, tall, height = layout.width, layout.tall, layout.height

    def add_axes(left: float, row: int, width: float) -> Axes:
        bottom = height - _TITLE - (row + 1) * (_MAP_TOP + tall + _MAP_BELOW) + _MAP_BELOW
        return figure.add_axes((left / _WIDTH, bottom / height, width / _WIDTH, tall / height))

    for i, kernel in enumerate(kernels):
        row, column = divmod(i, layout.columns)
        axes = add_axes(_LEFT + column * (width + _GAP), row, width)
        image = _map(axes, kernel, low, first=column == 0)
        size = min(10.0, 10 * (width + _GAP) / (_LETTER * (len(kernel.label) + 1)))
        axes.set_title(kernel.label, loc="left", fontsize=size, pad=5)
    _colour_bar(figure, image, add_axes(_LEFT + layout.columns * (width + _GAP) - _GAP + 0.12, 0, 0.13))


def _titles(figure: Picture, title: str | None, height: float) -> None:
    heading = title or "What a patch sees by its position alone"
    figure.text(0.12 / _WIDTH, 1 - 0.3 / height, heading, fontsize=13, color=INK)
    words = "cosine between the phase of the patch at the cross and that of each other token, mean over pairs"
    figure.text(0.12 / _WIDTH, 1 - 0.54 / height, words, fontsize=9, color="#555555")


def _map(axes: Axes, kernel: Kernel, low: float, *, first: bool) -> AxesImage:
    """The patches in colours from the least cosine of all kernels to 1, and a mark on the query."""
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(kernel.patches, cmap="cividis", vmin=low, vmax=1, interpolation="nearest")
    row, column = kernel.query
    for colour, size, edge in (("white", 9, 3.2), (INK, 8, 1.5)):
        axes.plot([column], [row], "x", color=colour, markersize=size, markeredgewidth=edge)
    axes.set_anchor("W")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.tick_params(length=0, colors="#444444", labelsize=8.5)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("column", fontsize=9, labelpad=2)
    if first:
        axes.set_ylabel("row", fontsize=9, labelpad=2)
    return image


def _colour_bar(figure: Picture, image: AxesImage, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    figure.colorbar(image, cax=axes)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.tick_params(length=0, colors="#444444", labelsize=8.5)
    axes.spines[:].set_visible(False)


def _key_lines(kernels: Sequence[Kernel]) -> int:
    return -(-len(kernels) // 3) if len(kernels) > 1 else 0


def _curves(figure: Picture, kernels: Sequence[Kernel], height: float) -> None:
    """Left the text before, which ends at the image; right the text after; one scale of cosines."""
    counts = [max(getattr(kernel, side).size for kernel in kernels) for side in ("before", "after")]
    band = _BAND if all(counts) else 0.0
    room = _WIDTH - _LEFT - 0.15 - band
    # Each side is as wide as its tokens, and wide enough to be read.
    share = np.clip(counts[0] / sum(counts), 0.25, 0.75) if all(counts) else float(bool(counts[0]))
    widths = (room * share, room * (1 - share))
    values = np.concatenate([side for kernel in kernels for side in (kernel.before, kernel.after)])
    margin = 0.06 * max(float(np.ptp(values)), 0.1)
    bounds = float(values.min()) - margin, float(values.max()) + margin
    left = _LEFT
    for side, width, count in zip(("before", "after"), widths, counts, strict=True):
        if count:
            axes = figure.add_axes((left / _WIDTH, _FOOT / height, width / _WIDTH, _CURVES / height))
            _side(axes, kernels, side, count, bounds)
            left += width
        if side == "before" and band:
            middle = (left + band / 2) / _WIDTH
            words: Style = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 9, "color": "#555555"}
            figure.text(middle, (_FOOT + _CURVES / 2) / height, "the image", **words)
            left += band
    if len(kernels) > 1:
        handles, labels = axes.get_legend_handles_labels()
        place: Style = {"loc": "lower left", "bbox_to_anchor": (_LEFT / _WIDTH, (_FOOT + _CURVES + 0.04) / height)}
        figure.legend(handles, labels, **place, ncols=3, frameon=False, fontsize=9, borderaxespad=0, handlelength=3.2)


def _side(axes: Axes, kernels: Sequence[Kernel], side: str, count: int, bounds: tuple[float, float]) -> None:
    from matplotlib.ticker import MaxNLocator

    styles = scheme_styles([kernel.label for kernel in kernels])
    for i, kernel in enumerate(kernels):
        values: Cosines = getattr(kernel, side)
        style: Style = {**styles[i], "linewidth": 1.6, "markersize": 4.5, "markeredgewidth": 0}
        # Markers of curves that meet lie beside each other.
        every = max(1, count // 8)
        axes.plot(np.arange(1, values.size + 1), values, label=kernel.label, markevery=(i * every // 6, every), **style)
    axes.set_xlim(*((count + 0.5, 0.5) if side == "before" else (0.5, count + 0.5)))
    axes.set_ylim(*bounds)
    quiet_axes(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.tick_params(labelsize=8.5)
    axes.set_xlabel(f"tokens {'before' if side == 'before' else 'after'} the image", fontsize=9)
    if side == "before" or not any(kernel.before.size for kernel in kernels):
        axes.set_ylabel("mean cosine", fontsize=9)
    else:
        axes.tick_params(labelleft=False)
