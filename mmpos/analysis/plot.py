"""Plots of ids, and of attention by position; matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN, NEXT_POSITION
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Float64Array
from mmpos.segments.kinds import AUDIO_TOKEN, GRID, NOUNS, PATCH
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, instance, integer
from mmpos.support.extras import needed_for
from mmpos.support.files import local_path, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Kernel", "attention_kernel", "plot_attention", "plot_positions"]

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK = "#222222"
_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.4, 1.2, 1.4)), "-.", ":")
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "mmpos",  # fixes element ids, so that equal figures have equal bytes
    "svg.fonttype": "none",  # keeps text searchable
    "pdf.fonttype": 42,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.color": "#e8e8e8",
    "legend.frameon": False,
}
_OMITTED = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}
"""Metadata that each kind of file omits, so that equal data gives equal bytes."""

_MAX_PANELS, _MAX_TOKENS, _MAX_KERNEL_TOKENS, _MAX_KERNELS = 9, 2**20, 2**16, 6
_WIDTH = 8.0  # width of a figure in inches
_NAMED = 4  # number of images with an entry in the legend


def plot_positions(
    positions: PositionTable | Sequence[PositionTable],
    path: str | PathLike[str] | None = None,
    *,
    segments: SegmentTable | None = None,
    pictures: Sequence[npt.NDArray[np.uint8]] = (),
    same_scale: bool = True,
) -> Figure:
    """Draw the ids of every document.

    A scheme with one axis is drawn as ids against token index, and any other as row ids against column ids. Equal
    tables produce equal bytes.

    Args:
        positions: one table, or several, such as one batch placed with several schemes: up to 9 documents in total and
            1,048,576 tokens in each table. Documents with the same index are drawn next to each other.
        path: the file to write, ending in .png, .svg or .pdf; None writes nothing.
        segments: the documents of every table, to distinguish audio from text and to draw each clip, thumbnail, tile or
            video as a whole; None draws audio as text, and every run of patches as an image.
        pictures: (height, width, 3) pixels to draw behind the first images, in order.
        same_scale: whether panels of the same kind show the same range of ids.

    Returns:
        The figure, which a notebook shows.

    Raises:
        InvalidInputError: there is no document, segments belong to other documents, or the suffix is unknown.
        LimitExceededError: there are too many documents or tokens.
        OSError: the file cannot be written.
        ImportError: matplotlib is not installed.
    """
    target, chosen = _path(path), _documents(positions)
    planes = [read_plane(table, d, segments) for table, d in chosen]
    names = [f"document {d + 1}, {table.scheme}" if chosen[-1][1] else table.scheme for table, d in chosen]
    laid, (rows, columns) = iter(pictures), _grid(len(planes))
    side = min(_WIDTH / columns - 0.8, 5.2)
    entries: dict[str, Any] = {}
    with _canvas(target, _WIDTH if len(planes) > 1 else side + 1.4, rows * (side + 1.1) + 0.5) as figure:
        for i, (plane, name) in enumerate(zip(planes, names, strict=True)):
            axes = figure.add_subplot(rows, columns, i + 1)
            shared = [other.bounds for other in planes if other.names == plane.names] if same_scale else [plane.bounds]
            bounds = np.stack([np.min(shared, axis=0)[:, 0], np.max(shared, axis=0)[:, 1]], axis=1)
            _draw_plane(axes, plane, bounds, laid, side)
            axes.set_title("\n".join([name, *plane.notes]))
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        figure.legend(entries.values(), entries, loc="outside lower left", ncols=4 if len(planes) > 1 else 3)
    return figure


def _documents(positions: PositionTable | Sequence[PositionTable]) -> list[tuple[PositionTable, int]]:
    """Check tables, and list their documents ordered by index."""
    tables: Sequence[Any] = positions if isinstance(positions, Sequence) else [positions]
    for i, table in enumerate(tables):
        name = f"positions[{i}]" if tables is positions else "positions"
        instance(name, table, PositionTable, "mmpos.place")
        if table.num_tokens > _MAX_TOKENS:
            raise LimitExceededError(f"{name}: got {counted(table.num_tokens, 'token')}, want at most {_MAX_TOKENS}")
    most = max((table.num_documents for table in tables), default=0)
    chosen = [(table, d) for d in range(most) for table in tables if d < table.num_documents]
    if not chosen:
        raise InvalidInputError("positions: got no document, want at least one")
    if len(chosen) > _MAX_PANELS:
        raise LimitExceededError(f"positions: got {counted(len(chosen), 'document')}, want at most {_MAX_PANELS}")
    return chosen


@dataclass(frozen=True, eq=False)
class _Image:
    """The patches of one grid, clip, thumbnail or tile."""

    points: Float64Array  # (2, tokens) x and y of each patch
    noun: str = "image"  # or "clip" (a video with audio), "thumbnail" or "tile"
    square: tuple[float, float] | None = None  # ids of the text right before and after it, if both are on the diagonal

    @property
    def gaps(self) -> str:
        """The (row, column) distances from the text before to the first patch, and from the last to the text after."""
        if self.square is None:
            return ""
        low, high = self.square
        sides = (self.points.min(axis=1) - low).tolist(), (high - self.points.max(axis=1)).tolist()
        exact = [[str(Fraction(gap).limit_denominator(10_000)) for gap in side[::-1]] for side in sides]
        before, after = (f"({', '.join(side)})" for side in exact)
        return f"gap {before} on both sides" if before == after else f"gaps {before} and {after}"

    @property
    def spacing(self) -> Float64Array:
        """(2,) smallest distance between distinct x and between distinct y; if one is constant, that of the other."""
        steps = np.array([np.diff(np.unique(values)).min(initial=np.inf) for values in self.points])
        return np.where(np.isfinite(steps), steps, steps.min() if np.isfinite(steps).any() else 1.0)


@dataclass(frozen=True, eq=False)
class _Plane:
    """The points of one document in two dimensions, as arrays (2, tokens); x points right, y points down."""

    names: tuple[str, str]  # of x and y
    axes: int  # number of axes of the ids; with one, x counts tokens
    text: Float64Array  # text and markers
    audio: Float64Array  # empty if segments are unknown
    images: tuple[_Image, ...]  # without segments, a grid that a scheme divides into pieces counts as several images
    end: Float64Array  # (2, 1) next position, or (2, 0) if the scheme has none

    @property
    def bounds(self) -> Float64Array:
        """(2, 2) smallest and largest x, smallest and largest y; the same for x and y if both are ids."""
        points = np.concatenate([self.text, self.audio, *(image.points for image in self.images), self.end], axis=1)
        if not points.size:
            return np.array([[0.0, 1.0], [0.0, 1.0]])
        low, high = points.min(axis=1), points.max(axis=1)
        if self.axes > 1:
            low[:], high[:] = low.min(), high.max()
        return np.stack([low, high], axis=1)

    @property
    def notes(self) -> list[str]:
        """The gaps of a single image, and the next position."""
        gaps = [image.gaps for image in self.images if image.gaps and len(self.images) == 1]
        return [*gaps, f"next position {self.end[1, 0]:,.0f}" if self.end.size else "no next position"]


def read_plane(positions: PositionTable, document: int, segments: SegmentTable | None = None) -> _Plane:
    """Compute the points of one document from a table; segments show what is audio, and which pieces form an image."""
    first, length = int(positions.documents[FIRST_TOKEN, document]), int(positions.lengths[document])
    axes = positions.axes
    shown = {1: (0, 0), 3: (2, 1)}.get(axes, (1, 0))
    points = positions.slice(first, first + length).dense(dtype=np.float64, axes=shown)
    end = np.full((2, int(positions.resumable[document])), float(positions.documents[NEXT_POSITION, document]))
    if axes == 1:
        points[0], end[:1] = np.arange(length), length
    pieces = positions.segment_lengths
    padding = positions.is_padding.repeat(pieces)
    owner, patch = np.arange(pieces.size).repeat(pieces), positions.is_grid.repeat(pieces)
    audio = np.zeros_like(padding)
    if segments is not None:
        types = positions.token_types(instance("segments", segments, SegmentTable, "SegmentTable.from_documents"))
        owner, patch = np.arange(segments.kind.size).repeat(segments.lengths), types == PATCH
        audio = types == AUDIO_TOKEN
    tokens = slice(first, first + length)
    owner, patch, audio = owner[tokens], patch[tokens], audio[tokens]
    text = ~(patch | audio | padding[tokens])
    images = []
    for part in np.unique(owner[patch]).tolist():
        begin, stop = owner.searchsorted([part, part + 1])
        patches = begin + np.flatnonzero(patch[begin:stop])
        kind = GRID if segments is None else int(segments.kind[part])
        a, b = int(patches[0]), int(patches[-1]) + 1
        before = points[:, a - 1] if a and text[a - 1] and owner[a - 1] != part else None
        after = points[:, b] if b < length and text[b] else None
        square = None
        if axes > 1 and before is not None and after is not None and before[0] == before[1] and after[0] == after[1]:
            square = float(before[0]), float(after[0])
        images.append(_Image(points[:, patches], "image" if kind == GRID else NOUNS[kind], square))
    names = ("column id", "row id") if axes > 1 else ("token", "position id")
    names = ("id on axis 1", "id on axis 0") if axes > 3 else names
    return _Plane(names, axes, points[:, text], points[:, audio], tuple(images), end)


def _draw_plane(
    axes: Axes, plane: _Plane, bounds: Float64Array, pictures: Iterator[npt.NDArray[np.uint8]], inches: float
) -> None:
    """Draw text, audio, images and the next position in a square of this side, which shows ids within bounds (2, 2)."""
    margin = np.maximum(0.05 * (bounds[:, 1] - bounds[:, 0]), 0.8)
    (left, right), (low, high) = (bounds + np.stack([-margin, margin], axis=1)).tolist()
    scale = 72 * inches / (right - left)  # points on the page per id
    axes.set(xlim=(left, right), ylim=(high, low) if plane.axes > 1 else (low, high), box_aspect=1)
    axes.set(xlabel=plane.names[0], ylabel=plane.names[1])
    axes.locator_params(nbins=5, integer=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    if plane.axes > 1:
        axes.axline((left, left), slope=1, color="#dddddd", linewidth=0.8, zorder=0.9)
    size = float(np.clip(0.4 * scale, 2.4, 4))
    for points, noun, face in ((plane.text, "text", _INK), (plane.audio, "audio", "white")):
        if points.size:
            axes.plot(*points, "o", color=_INK, markersize=size, markerfacecolor=face, zorder=3, label=noun)
    for i, image in enumerate(plane.images):
        picture = next(pictures, None) if plane.axes in (2, 3) else None
        label = f"{image.noun} {i + 1}" if len(plane.images) > 1 else image.noun
        _draw_image(axes, image, COLOURS[i % len(COLOURS)], scale, picture, label if i < _NAMED else None)
    if plane.end.size:
        style: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": _INK, "markeredgewidth": 1.3}
        axes.plot(*plane.end, "D", markersize=7, zorder=4, clip_on=False, label="next position", **style)


def _draw_image(
    axes: Axes, image: _Image, colour: str, scale: float, picture: npt.NDArray[np.uint8] | None, label: str | None
) -> None:
    """Draw the square between the texts around an image, its picture, and its patches."""
    if image.square:
        low, high = image.square
        corners = [low, high, high, low, low], [low, low, high, high, low]
        axes.plot(*corners, "--", color=colour, alpha=0.7, linewidth=1, zorder=1.5, label="from text to text")
    size, edge = float(np.clip(0.5 * image.spacing.min() * scale, 1.5, 5.5)), 0.0
    if picture is not None:
        (left, top), (right, bottom) = image.points.min(axis=1), image.points.max(axis=1)
        x, y = image.spacing / 2
        extent = (left - x, right + x, bottom + y, top - y)
        axes.imshow(picture, extent=extent, aspect="auto", alpha=0.75, zorder=1, interpolation="bilinear")
        size, edge = size + 0.6, 0.6  # a white edge is visible on any picture
    style: dict[str, Any] = {"markersize": size, "markeredgewidth": edge, "markeredgecolor": "white", "zorder": 2}
    axes.plot(*image.points, "o", color=colour, label=label, **style)


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
    patches: Float64Array
    before: Float64Array
    after: Float64Array


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
    tokens = positions.num_tokens
    if positions.num_documents != 1:
        raise InvalidInputError(f"positions: got {counted(positions.num_documents, 'document')}, want 1")
    if tokens > _MAX_KERNEL_TOKENS:
        raise LimitExceededError(f"positions: got {counted(tokens, 'token')}, want at most {_MAX_KERNEL_TOKENS}")
    if positions.axes != rotary.axes:
        raise InvalidInputError(f"positions: got {counted(positions.axes, 'axis')}, want {rotary.axes} as in rotary")
    token, segment = _query(positions, token)
    first, height, width = (int(row[segment]) for row in (positions.offset, positions.height, positions.width))
    frame, index = divmod(token - first, height * width)
    ids = positions.dense(dtype=np.float64)
    angles = rotary.pair_ids(ids[:, [token]] - ids) * rotary.inv_freq_array[..., None]
    cosines: Float64Array = np.cos(angles).reshape(-1, tokens).mean(axis=0)
    patches = cosines[first:][frame * height * width :][: height * width].reshape(height, width)
    others = np.flatnonzero(positions.is_grid | positions.is_padding)
    i, edges = int(others.searchsorted(segment)), np.append(positions.offset, tokens)
    before = cosines[edges[others[i - 1] + 1 if i else 0] : edges[segment]]
    after = cosines[edges[segment + 1] : edges[others[i + 1] if i + 1 < others.size else -1]]
    if label is None:
        allocation = rotary.allocation if isinstance(rotary.allocation, str) else "own allocation"
        label = positions.scheme + (f", {allocation}" if positions.axes > 1 else "")
    return Kernel(label, divmod(index, width), patches, before[::-1], after)


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
    middle = first + (frames // 2 * height + height // 2) * width + width // 2
    return middle if token is None else token, segment


def plot_attention(kernels: Sequence[Kernel], path: str | PathLike[str] | None = None) -> Figure:
    """Draw kernels of the same document: maps side by side with one colour scale, and curves for text below them.

    The path, the result and the errors are as for ``plot_positions``.

    Args:
        kernels: 1 to 6 results of ``attention_kernel``.
        path: the file to write; None writes nothing.

    Raises:
        InvalidInputError: there is no kernel.
        LimitExceededError: there are more than 6 kernels.
    """
    target = _path(path)
    if isinstance(kernels, Kernel) or not isinstance(kernels, Sequence):
        raise InvalidInputError(f"kernels: got {type(kernels).__name__}, want a list of Kernel")
    if not kernels:
        raise InvalidInputError("kernels: got none, want at least one")
    if len(kernels) > _MAX_KERNELS:
        raise LimitExceededError(f"kernels: got {len(kernels)}, want at most {_MAX_KERNELS}")
    for i, kernel in enumerate(kernels):
        instance(f"kernels[{i}]", kernel, Kernel, "attention_kernel")
    rows, columns = _grid(len(kernels))
    low = min(float(kernel.patches.min()) for kernel in kernels)
    with _canvas(target, _WIDTH, 2.4 * rows + 3.4) as figure:
        figure.suptitle("Attention of a patch by position alone: mean cosine between phases", color=_INK)
        maps, texts = figure.subfigures(2, 1, squeeze=False, height_ratios=[2.4 * rows, 3])[:, 0]
        for i, kernel in enumerate(kernels):
            axes = maps.add_subplot(rows, columns, i + 1)
            image = axes.imshow(kernel.patches, cmap="cividis", vmin=low, vmax=1.0, interpolation="nearest")
            axes.plot(*kernel.query[::-1], "X", color="white", markeredgecolor=_INK, markersize=9)
            axes.locator_params(nbins=5, integer=True)
            axes.grid(visible=False)
            axes.set(title=kernel.label, xlabel="column", ylabel="row")
        maps.colorbar(image, ax=maps.axes, fraction=0.04)
        axes = texts.subplots()
        for kernel, colour, dashes in zip(kernels, COLOURS, _DASHES, strict=False):
            scores = np.concatenate([kernel.before[::-1], [np.nan], kernel.after])
            tokens = np.arange(-kernel.before.size, kernel.after.size + 1)
            axes.plot(tokens, scores, color=colour, linestyle=dashes, label=kernel.label)
        axes.set(xlabel="text tokens before and after the image", ylabel="mean cosine")
        axes.legend()
    return figure


def _path(path: str | PathLike[str] | None) -> Path | None:
    """Check the path of a plot; None writes no file."""
    if path is None:
        return None
    target = local_path("path", path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInputError(f"path: got {str(path)!r}, want a file ending in .png, .svg or .pdf")
    return target


def _grid(count: int) -> tuple[int, int]:
    """Return the rows and columns in which to arrange this number of panels."""
    columns = min(count, 2 if count in (2, 4) else 3)
    return -(-count // columns), columns


@contextmanager
def _canvas(target: Path | None, width: float, height: float) -> Iterator[Figure]:
    """Open a figure of this size in inches that lays out its panels; write it if the block ends without an error."""
    with needed_for("plots", extra="cli"):
        import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc
        matplotlib.rcParams.update(_SETTINGS)
        figure = _picture_class()(figsize=(width, height), facecolor="white", layout="constrained")
        yield figure
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # another layout would move panels slightly
        if target is not None:
            kind = target.suffix.lower()[1:]
            with whole_file(target) as file:
                figure.savefig(file, format=kind, dpi=200, metadata=dict.fromkeys(_OMITTED[kind]))


@cache
def _picture_class() -> type[Figure]:
    """Define the class of all figures, which notebooks show even if pyplot was never imported."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            data = BytesIO()
            self.savefig(data, format="png", dpi=100)
            return data.getvalue()

    return Picture
