"""Positions of a vLLM request: its segments from spans and grids, and the three rows of ids that vLLM takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mmpos.errors import InvalidInputError, UnsupportedError
from mmpos.integrations.sections import Sections, request_positions
from mmpos.positions.place import place
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import boolean, host_array, int_array, integer
from mmpos.support.ragged import true_runs

__all__ = ["check_apart", "mrope_input_positions", "request_segments"]

GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
SECONDS = "second_per_grid_ts"
AS_TEXT = "prompt_embeds"


class Span(Protocol):
    """Part of vLLM's PlaceholderRange that is used here."""

    offset: int
    length: int
    is_embed: object


class Feature(Protocol):
    """Part of vLLM's MultiModalFeatureSpec that is used here."""

    modality: str
    data: Mapping[str, Any] | None
    mm_position: Span


def request_segments(
    num_tokens: int, mm_features: Sequence[Feature], *, spatial_merge_size: int, row_separator: bool = False
) -> SegmentTable:
    """Make the segments of one request from the spans and grids of its images and videos.

    A feature is vLLM's MultiModalFeatureSpec, or anything with its fields: ``modality``, ``data`` with the grid, and
    ``mm_position`` with ``offset``, ``length`` and ``is_embed``. Where ``is_embed`` marks the patches of a span, their
    runs show what they are: one run is the whole grid, and a run per frame is a video with text between
    its frames (Qwen3-VL).

    Args:
        num_tokens: tokens of the prompt.
        mm_features: of the request, in any order; those of modality "prompt_embeds" are text.
        spatial_merge_size: patches merged along each side into one token; grids in ``data`` are those before it.
        row_separator: whether every row of a grid ends in one more token of its span (Pixtral).

    Returns:
        a SegmentTable of one document, new.

    Raises:
        InvalidInputError: a feature whose span is not that of its grid; grids that overlap or leave the prompt.
        UnsupportedError: a modality without a grid.
    """
    num_tokens = integer("num_tokens", num_tokens, minimum=1)
    merge = integer("spatial_merge_size", spatial_merge_size, minimum=1)
    separators = int(boolean("row_separator", row_separator))
    items = [
        _read(f"mm_features[{i}]", feature, merge)
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
    """Refuse images without text between them, if the scheme does, by their spans, before their grids are known.

    Args:
        mm_placeholders: of each modality the spans of its items, with ``offset`` and ``length``.
        scheme: a name from mmpos.SCHEMES or a scheme object.

    Raises:
        InvalidInputError: naming the span that begins where another ends.
    """
    if not get_scheme(scheme).strict:
        return
    spans = sorted((span.offset, span.offset + span.length) for items in mm_placeholders.values() for span in items)
    for (_, stop), (start, _) in pairwise(spans):
        if start == stop:
            raise InvalidInputError(
                f"mm_placeholders: got an image at token {start} right after an image, want text between them in "
                f"{get_scheme(scheme).name}"
            )


class _Item(NamedTuple):
    """Span of a feature, and its frames, height and width after merging."""

    name: str
    offset: int
    length: int
    is_embed: npt.NDArray[np.bool_] | None
    grid: list[int]
    seconds: float | None


def _read(name: str, feature: Feature, merge: int) -> _Item:
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
    """Return the first token of each grid of a feature, and its sides."""
    frames, height, width = item.grid
    rows, ended = frames * height, " and a token after each row" * separators
    if item.is_embed is None:
        tokens = rows * (width + separators)
        if item.length != tokens:
            want = f"{tokens} for {frames}x{height}x{width} after merging{ended}"
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
    plain = f"one of {rows * width}, one per frame, or row_separator=True"
    want = f"{rows} of {width} with a token after each" if separators else plain
    raise InvalidInputError(
        f"{item.name}.mm_position.is_embed: got runs of {sizes[:8]} patches, want {want} for "
        f"{frames}x{height}x{width} after merging"
    )


def mrope_input_positions(
    input_tokens: Sequence[int],
    mm_features: Sequence[Feature],
    *,
    scheme: str | Scheme,
    sections: Sections,
    spatial_merge_size: int,
    max_new_tokens: int = 0,
    strict: bool | None = None,
    row_separator: bool = False,
) -> tuple[Tensor, int]:
    """Return the ids of a prompt as ``SupportsMRoPE.get_mrope_input_positions`` does.

    vLLM slices them for chunks and cached prefixes, and gives token i after the prompt the id i + delta. An exception
    in its worker ends the engine with all its requests: call this once where a request comes in, with
    ``max_new_tokens``, to refuse it there.

    Args:
        input_tokens: of the prompt; only counted.
        mm_features: of the request, as vLLM holds them; see ``request_segments``.
        scheme: a name from mmpos.SCHEMES or a scheme object.
        sections: layout of vLLM's rotation.
        spatial_merge_size: patches merged along each side into one token.
        max_new_tokens: tokens that may be generated.
        strict: whether two images without text between are an error; None asks the scheme.
        row_separator: whether every row of a grid ends in one more token of its span.

    Returns:
        (3, tokens) int64 ids, a new tensor on the CPU, and delta.

    Raises:
        InvalidInputError: a feature whose span is not that of its grid; touching images; a negative id.
        UnsupportedError: a scheme with fractions or without a next position, or with no place for what is there.
        LimitExceededError: ids, or the cursor and max_new_tokens, reach beyond the cos/sin cache.
    """
    segments = request_segments(
        len(input_tokens), mm_features, spatial_merge_size=spatial_merge_size, row_separator=row_separator
    )
    return request_positions(place(segments, scheme, strict=strict), sections, max_new_tokens=max_new_tokens)
