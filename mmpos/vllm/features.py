"""From the multimodal features of a vLLM request to its segments: spans and grids are read, tokens are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mmpos.checks import IntArray, host_array, int_array, integer
from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.ranges import runs
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments import SegmentTable

__all__ = ["check_apart", "request_segments"]

GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS = "second_per_grid_ts"
AS_TEXT = "prompt_embeds"


def request_segments(num_tokens: int, mm_features: Sequence[Any], *, spatial_merge_size: int) -> SegmentTable:
    """The segments of one request, from what vLLM knows of its images and videos.

    A feature is vLLM's MultiModalFeatureSpec, or anything with its fields: ``modality``, ``data`` with the grid, and
    ``mm_position`` with ``offset``, ``length`` and ``is_embed``. Where ``is_embed`` tells patches from other tokens of
    a span, their runs say what they are: one run is the whole grid, a run per frame is a video with text between its
    frames (Qwen3-VL), and a run per row, with one more token after each, is an image with row separators (Pixtral).

    Args:
        num_tokens: tokens of the prompt.
        mm_features: of the request, in any order; those of modality "prompt_embeds" are text.
        spatial_merge_size: patches merged along each side into one token; grids in ``data`` are those before it.

    Returns:
        a SegmentTable of one document, new.

    Raises:
        InvalidInputError: a feature whose span is not that of its grid, or lies over another.
        UnsupportedError: a modality without a grid, or row separators in some images only.
    """
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1)
    items = [_read(f"mm_features[{i}]", feature) for i, feature in enumerate(mm_features) if _has_patches(feature)]
    items.sort(key=lambda item: item.offset)
    pieces = [_pieces(item, grid) for item, grid in zip(items, _merged(items, merge), strict=True)]
    separated = [item.name for item, piece in zip(items, pieces, strict=True) if piece.row_separator]
    if separated and len(separated) < len(items):
        plain = next(item.name for item in items if item.name not in separated)
        raise UnsupportedError(f"{plain}: got no row separators, want them as in {separated[0]}")
    times = [item.seconds for item, piece in zip(items, pieces, strict=True) for _ in piece.offsets]
    return SegmentTable.from_spans(
        [num_tokens],
        [offset for piece in pieces for offset in piece.offsets],
        [grid for piece in pieces for grid in piece.grids],
        seconds_per_frame=None if all(time is None for time in times) else times,
        row_separator=bool(separated),
    )


def check_apart(mm_placeholders: Mapping[str, Sequence[Any]], scheme: str | Scheme) -> None:
    """Refuse images without text between them, if the scheme does; vLLM knows their spans before it knows grids.

    Args:
        mm_placeholders: of each modality the spans of its items, with ``offset`` and ``length``.
        scheme: a name from mmpos.SCHEMES or a scheme object.

    Raises:
        InvalidInputError: naming the span that begins where another ends.
    """
    if not get_scheme(scheme).strict:
        return
    spans = sorted((span.offset, span.offset + span.length) for found in mm_placeholders.values() for span in found)
    for (_, stop), (start, _) in pairwise(spans):
        if start == stop:
            raise InvalidInputError(
                f"mm_placeholders: got an image at token {start} right after an image, want text between them in "
                f"{get_scheme(scheme).name}"
            )


class _Item(NamedTuple):
    """What is read of a feature: its span, and its grid before merging."""

    name: str
    offset: int
    length: int
    is_embed: Any
    grid: list[int]
    seconds: float | None


class _Pieces(NamedTuple):
    """The grids that a feature is made of, and where they begin."""

    offsets: Sequence[int]
    grids: Sequence[Sequence[int]]
    row_separator: bool = False


def _has_patches(feature: Any) -> bool:
    return getattr(feature, "modality", None) != AS_TEXT


def _read(name: str, feature: Any) -> _Item:
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
    grid = host_array(f"{name}.data.{GRIDS[modality]}", data[GRIDS[modality]].data).tolist()
    seconds = float(data[SECONDS].data) if modality == "video" and SECONDS in data else None
    return _Item(name, offset, length, is_embed, grid, seconds)


def _merged(items: Sequence[_Item], merge: int) -> list[list[int]]:
    """Frames, height and width of every item, after merging."""
    grids: IntArray = int_array("grid_thw of mm_features", [item.grid for item in items], (len(items), 3))
    odd = (grids < 1).any(axis=1) | (grids[:, 1:] % merge > 0).any(axis=1)
    if odd.any():
        item = items[int(odd.argmax())]
        want = f"frames >= 1, and height and width that are multiples of spatial_merge_size {merge}"
        raise InvalidInputError(f"{item.name}.data: got grid_thw {item.grid}, want {want}")
    merged: list[list[int]] = (grids // [1, merge, merge]).tolist()
    return merged


def _pieces(item: _Item, grid: list[int]) -> _Pieces:
    frames, height, width = grid
    tokens = frames * height * width
    if item.is_embed is None:
        if item.length != tokens:
            want = f"{tokens} for {frames}x{height}x{width} after merging"
            raise InvalidInputError(f"{item.name}.mm_position.length: got {item.length}, want {want}")
        return _Pieces([item.offset], [grid])
    starts, stops = runs(host_array(f"{item.name}.mm_position.is_embed", item.is_embed).astype(np.bool_))
    offsets, sizes = (starts + item.offset).tolist(), (stops - starts).tolist()
    if sizes == [tokens]:
        return _Pieces(offsets, [grid])
    if sizes == [height * width] * frames:
        return _Pieces(offsets, [[1, height, width]] * frames)
    after = np.append(starts[1:], item.length) - stops
    if frames == 1 and sizes == [width] * height and (after == 1).all():
        return _Pieces(offsets[:1], [grid], row_separator=True)
    raise InvalidInputError(
        f"{item.name}.mm_position.is_embed: got runs of {sizes[:8]} patches, want one of {tokens} for "
        f"{frames}x{height}x{width} after merging, one per frame, or one per row with a token after each"
    )
