"""Positions for vLLM: the segments of a request from the spans and grids of its features, and its rows of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.request_ids import request_ids
from mmpos.positions.place import place
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import boolean, host_array, int_array, integer
from mmpos.support.ragged import true_runs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_apart", "mrope_input_positions", "request_segments"]

GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS = "second_per_grid_ts"
AS_TEXT = "prompt_embeds"


class Span(Protocol):
    """Fields of vLLM's PlaceholderRange that are used here."""

    offset: int
    length: int
    is_embed: object


class Feature(Protocol):
    """Fields of vLLM's MultiModalFeatureSpec that are used here."""

    modality: str
    data: Mapping[str, Any] | None
    mm_position: Span


def request_segments(
    num_tokens: int, mm_features: Sequence[Feature], *, spatial_merge_size: int, row_separator: bool = False
) -> SegmentTable:
    """Build the segment table of one request from the spans and grids of its images and videos.

    A feature is vLLM's MultiModalFeatureSpec, or any object with the same fields: ``modality``, ``data``, which
    contains the grid, and ``mm_position`` with ``offset``, ``length`` and ``is_embed``. If ``is_embed`` marks the
    patches of a span, a single run of patches is a whole grid, and one run per frame is a video with text between
    frames (Qwen3-VL).

    Args:
        num_tokens: number of tokens in the prompt.
        mm_features: features of the request, in any order; features with modality "prompt_embeds" are treated as text.
        spatial_merge_size: side, in patches, of the square merged into one token; grids in ``data`` are not merged yet.
        row_separator: whether every row of a grid ends with an extra token that belongs to the span (Pixtral).

    Returns:
        A new SegmentTable with one document.

    Raises:
        InvalidInputError: the span of a feature does not match its grid, or grids overlap or extend beyond the prompt.
        UnsupportedError: a modality has no grids.
    """
    num_tokens = integer("num_tokens", num_tokens, minimum=1)
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1)
    separators = int(boolean("row_separator", row_separator))
    items = [
        _item(f"mm_features[{i}]", feature, merge)
        for i, feature in enumerate(mm_features)
        if getattr(feature, "modality", None) != AS_TEXT
    ]
    items.sort(key=lambda item: item.offset)
    pieces = [(*piece, item.seconds) for item in items for piece in _pieces(item, separators)]
    offsets, grids, times = zip(*pieces, strict=True) if pieces else ((), (), ())
    return SegmentTable.from_spans(
        [num_tokens],
        offsets,
        grids,
        seconds_per_frame=None if all(time is None for time in times) else times,
        row_separator=bool(separators),
    )


def check_apart(mm_placeholders: Mapping[str, Sequence[Span]], scheme: str | Scheme) -> None:
    """Check that there is text between images if the scheme requires it; only the spans of images are needed.

    Args:
        mm_placeholders: spans of the items in each modality, with ``offset`` and ``length``.
        scheme: a name from mmpos.SCHEMES or a scheme object.

    Raises:
        InvalidInputError: a span begins where another ends; the message contains the token index.
    """
    if not get_scheme(scheme).strict:
        return
    spans = sorted((span.offset, span.offset + span.length) for items in mm_placeholders.values() for span in items)
    for (_, stop), (start, _) in pairwise(spans):
        if start == stop:
            raise InvalidInputError(
                f"mm_placeholders: got an image at token {start} right after an image, want text between them in "
                f"scheme {get_scheme(scheme).name!r}"
            )


class _Item(NamedTuple):
    """Span of a feature; ``grid`` holds its frames, height and width after merging."""

    name: str
    offset: int
    length: int
    is_embed: npt.NDArray[np.bool_] | None
    grid: list[int]
    seconds: float | None


def _item(name: str, feature: Feature, merge: int) -> _Item:
    try:
        modality, data, position = feature.modality, feature.data, feature.mm_position
        offset, length, is_embed = position.offset, position.length, position.is_embed
    except AttributeError as error:
        got = type(feature).__name__
        raise InvalidInputError(f"{name}: got {got}, want the fields of a MultiModalFeatureSpec ({error})") from None
    if modality not in GRIDS:
        raise UnsupportedError(f"{name}.modality: got {modality!r}, want one of {', '.join(map(repr, GRIDS))}")
    if data is None or GRIDS[modality] not in data:
        got = "None (vLLM sends no item twice)" if data is None else str(sorted(data))
        raise InvalidInputError(f"{name}.data: got {got}, want an item with {GRIDS[modality]}")
    offset = integer(f"{name}.mm_position.offset", offset, minimum=0)
    length = integer(f"{name}.mm_position.length", length, minimum=0)
    grid = int_array(f"{name}.data.{GRIDS[modality]}", data[GRIDS[modality]].data, (3,)).tolist()
    frames, height, width = grid
    if min(grid) < 1 or height % merge or width % merge:
        want = f"frames >= 1, and height and width that are multiples of spatial_merge_size {merge}"
        raise InvalidInputError(f"{name}.data: got grid_thw {grid}, want {want}")
    seconds = float(data[SECONDS].data) if SECONDS in data else None
    mask = _mask(f"{name}.mm_position.is_embed", is_embed, length)
    return _Item(name, offset, length, mask, [frames, height // merge, width // merge], seconds)


def _mask(name: str, is_embed: object, length: int) -> npt.NDArray[np.bool_] | None:
    if is_embed is None:
        return None
    mask = host_array(name, is_embed)
    if mask.dtype != np.bool_ or mask.shape != (length,):
        raise InvalidInputError(f"{name}: got {mask.dtype} {mask.shape}, want bool ({length},), one per token")
    return mask


def _pieces(item: _Item, separators: int) -> list[tuple[int, list[int]]]:
    """Return the first token and the sides of each grid in a feature."""
    frames, height, width = item.grid
    rows, separated = frames * height, " and a token after each row" * separators
    if item.is_embed is None:
        tokens = rows * (width + separators)
        if item.length != tokens:
            want = f"{tokens} for {frames}x{height}x{width} after merging{separated}"
            raise InvalidInputError(f"{item.name}.mm_position.length: got {item.length}, want {want}")
        return [(item.offset, item.grid)]
    starts, stops = true_runs(item.is_embed).T
    offsets, sizes = (starts + item.offset).tolist(), (stops - starts).tolist()
    if separators:
        after = np.append(starts[1:], item.length) - stops
        if sizes == [width] * rows and (after[:-1] == 1).all() and after[-1] >= 1:
            return [(offsets[0], item.grid)]
    elif sizes == [rows * width]:
        return [(offsets[0], item.grid)]
    elif sizes == [height * width] * frames:
        return [(offset, [1, height, width]) for offset in offsets]
    unseparated = f"one of {rows * width}, one per frame, or row_separator=True"
    want = f"{rows} of {width} with a token after each" if separators else unseparated
    raise InvalidInputError(
        f"{item.name}.mm_position.is_embed: got runs of {sizes[:8]} patches, want {want} for "
        f"{frames}x{height}x{width} after merging"
    )


def mrope_input_positions(
    input_tokens: Sequence[int],
    mm_features: Sequence[Feature],
    *,
    scheme: str | Scheme,
    spatial_merge_size: int,
    strict: bool | None = None,
    row_separator: bool = False,
) -> tuple[Tensor, int]:
    """Return the ids and the delta for a prompt, like ``SupportsMRoPE.get_mrope_input_positions``.

    vLLM slices the ids for chunks and cached prefixes, and assigns the id i + delta to each token i after the prompt.
    With two axes, the three rows are row, row, column. vLLM does not compare ids with the number of rows of its cos/sin
    cache. An exception in a vLLM worker stops the engine and all its requests, so call this function when the request
    arrives to refuse a request safely.

    Args:
        input_tokens: tokens of the prompt; only their number is used.
        mm_features: vLLM's features of the request; see ``request_segments``.
        scheme: a name from mmpos.SCHEMES or a scheme object.
        spatial_merge_size: side, in patches, of the square merged into one token.
        strict: whether to raise an error for two images without text between them; None uses the scheme's default.
        row_separator: whether every row of a grid ends with an extra token that belongs to the span.

    Returns:
        (3, tokens) int64 ids in a new tensor on the CPU, and the delta.

    Raises:
        InvalidInputError: the span of a feature does not match its grid, images are adjacent, or an id is negative.
        UnsupportedError: ids may be fractions, the scheme has no next position or more than three axes, or it cannot
            place a segment.
    """
    segments = request_segments(
        len(input_tokens), mm_features, spatial_merge_size=spatial_merge_size, row_separator=row_separator
    )
    return request_ids(place(segments, scheme, strict=strict))
