"""Ids of vLLM requests, computed from their spans and grids; contrib/vllm tests the plugin."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import assert_refused

import mmpos
from mmpos import Grid, InvalidInputError, LimitExceededError, MmposError, SegmentTable, Text, UnsupportedError, place
from mmpos.integrations.vllm import check_apart, mrope_input_positions, request_segments


def feature(modality: str, offset: int, length: int, mask: list[int] | None = None, **data: Any) -> Any:
    """Return a feature with the fields of vLLM's MultiModalFeatureSpec that mmpos reads."""
    is_embed = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    return SimpleNamespace(
        modality=modality,
        data={key: SimpleNamespace(data=torch.tensor(value)) for key, value in data.items()},
        mm_position=SimpleNamespace(offset=offset, length=length, is_embed=is_embed),
    )


def image(offset: int, height: int, width: int) -> Any:
    """Return the feature of an image with ``height`` × ``width`` tokens, each merged from 2×2 patches."""
    return feature("image", offset, height * width, image_grid_thw=[1, 2 * height, 2 * width])


def ids(tokens: int, features: list[Any], scheme: Any = "rope-tie", **more: Any) -> tuple[list[list[int]], int]:
    rows, delta = mrope_input_positions([0] * tokens, features, scheme=scheme, spatial_merge_size=2, **more)
    assert rows.dtype == torch.int64
    return rows.tolist(), delta


def test_a_request_has_three_rows_of_ids_and_a_delta() -> None:
    steps, columns = [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]
    for tokens, features, scheme, want in (
        (4, [], "rope-tie", ([[0, 1, 2, 3]] * 3, 0)),
        (4, [feature("prompt_embeds", 1, 2)], "rope-tie", ([[0, 1, 2, 3]] * 3, 0)),
        (8, [image(1, 2, 3)], "mrope", ([[0, *[1] * 6, 4], steps, columns], -3)),
        (6, [image(0, 2, 2)], "flatten", ([[0, 1, 2, 3, 4, 5]] * 3, 0)),
    ):
        assert ids(tokens, features, scheme) == want
    assert ids(9, [image(1, 1, 2), image(3, 1, 2)], strict=False)[1] == 6  # adjacent images


def ids_of(document: list[Text | Grid]) -> tuple[list[list[int]], int]:
    table = place(SegmentTable.from_documents([document]), "rope-tie")
    return table.dense(axes=(0, 0, 1)).tolist(), int(table.deltas[0])


def test_ids_of_a_request_do_not_depend_on_the_order_of_features() -> None:
    want = ids_of([Text(1), Grid(2, 3), Text(2), Grid(1, 2), Text(3), Grid(4, 1), Text(1)])
    for features in permutations([image(1, 2, 3), image(9, 1, 2), image(14, 4, 1)]):
        assert ids(19, [*features]) == want


def test_a_mask_with_a_run_per_frame_separates_grids_and_one_run_is_a_whole_grid() -> None:
    frame = [0, 0, 1, 1, 0]  # timestamp, marker, two patches, marker
    video = feature("video", 2, 10, frame * 2, video_grid_thw=[2, 2, 4])
    whole = feature("video", 2, 14, [0, *[1] * 12, 0], video_grid_thw=[2, 4, 6])
    cases: tuple[tuple[int, Any, list[Text | Grid]], ...] = (
        (13, video, [Text(4), Grid(1, 2), Text(3), Grid(1, 2), Text(2)]),
        (17, whole, [Text(3), Grid(2, 3, frames=2), Text(2)]),
    )
    for tokens, span, document in cases:
        table = request_segments(tokens, [span], spatial_merge_size=2)
        assert table.extents.tolist() == SegmentTable.from_documents([document]).extents.tolist()


def test_frame_ids_of_a_whole_video_depend_on_its_seconds() -> None:
    video = feature("video", 1, 3, video_grid_thw=[3, 2, 2], second_per_grid_ts=1.5)
    frames = ids(5, [video], mmpos.schemes.MRopeQwen25(2))[0][0]
    assert frames == [0, 1, 4, 7, 8]


def test_rows_of_a_span_may_end_with_a_separator() -> None:
    row = [1, 1, 1, 0]
    separated = feature("image", 2, 8, row * 2, image_grid_thw=[1, 4, 6])
    one = feature("image", 11, 4, [1, 1, 1, 0], image_grid_thw=[1, 2, 6])
    unmarked = feature("image", 16, 6, image_grid_thw=[1, 4, 4])
    table = request_segments(24, [separated, one, unmarked], spatial_merge_size=2, row_separator=True)
    grids = [Grid(height, width, row_separator=True) for height, width in ((2, 3), (1, 3), (2, 2))]
    want = SegmentTable.from_documents([[Text(2), grids[0], Text(1), grids[1], Text(1), grids[2], Text(2)]])
    assert table.extents.tolist() == want.extents.tolist()
    assert table.row_separator is not None
    assert table.row_separator.tolist() == [False, True] * 3 + [False]
    assert ids(12, [separated], row_separator=True) == ids_of([Text(2), grids[0], Text(2)])
    for mask, grid, separator in (
        (row * 2, [1, 4, 6], False),
        ([*row, *row], [1, 6, 6], True),
        ([*row, 0, *row], [1, 4, 6], True),
        ([*row, 1, 1, 1], [1, 4, 6], True),
    ):
        span = feature("image", 2, len(mask), mask, image_grid_thw=grid)
        got = "mm_features[0].mm_position.is_embed: got runs of [3, 3] patches, want"
        assert_refused(got, partial(ids, 12, [span], row_separator=separator))


NO_GRID = SimpleNamespace(modality="image", data=None, mm_position=image(0, 1, 1).mm_position)
NO_BOOL = SimpleNamespace(
    **vars(image(0, 1, 2)) | {"mm_position": SimpleNamespace(offset=0, length=2, is_embed=[1, 1])}
)
HALF: Any = 2.5
NOTHING: Any = None
RAW = {"image_grid_thw": [1, 2, 2]}  # not in a MultiModalFieldElem
FIRST = "mm_features[0]"
REFUSED: list[tuple[str, list[Any]]] = [
    ("mm_features[1].mm_position.length: got 5, want 6 for 1x2x3 after merging",
     [image(0, 1, 2), feature("image", 4, 5, image_grid_thw=[1, 4, 6])]),
    (f"{FIRST}.data: got grid_thw [1, 4, 5], want frames >= 1, and height and width that are multiples of",
     [feature("image", 0, 6, image_grid_thw=[1, 4, 5])]),
    (f"{FIRST}.data: got grid_thw [1, 0, 4], want", [feature("image", 0, 0, image_grid_thw=[1, 0, 4])]),
    (f"{FIRST}.mm_position.is_embed: got runs of [2, 1, 2] patches, want one of 4, one per frame, or row",
     [feature("video", 0, 9, [1, 1, 0, 1, 0, 1, 1, 0, 0], video_grid_thw=[2, 2, 4])]),
    (f"{FIRST}.mm_position.is_embed: got runs of [3, 3] patches, want one of 18, one per frame",
     [feature("video", 0, 8, [1, 1, 1, 0, 1, 1, 1, 0], video_grid_thw=[3, 4, 6])]),
    (f"{FIRST}.mm_position.is_embed: got bool (6,), want bool (8,), one per token",
     [feature("image", 0, 8, [1, 1, 1, 1, 1, 1], image_grid_thw=[1, 4, 6])]),
    (f"{FIRST}.mm_position.is_embed: got int64 (2,), want bool (2,)", [NO_BOOL]),
    ("offsets[1]: got 4 in document 0, want >= 6, the end of the span before it", [image(4, 1, 1), image(2, 2, 2)]),
    ("offsets[0]: the span of 4 tokens ends at 22, want <= 20, the length of document 0", [image(18, 2, 2)]),
    (f"{FIRST}.mm_position.offset: got -1, want >= 0", [image(-1, 1, 1)]),
    (f"{FIRST}.mm_position.offset: got 2.5, want an integer", [image(HALF, 1, 1)]),
    (f"{FIRST}.data: got None (vLLM sends no item twice), want an item with image_grid_thw", [NO_GRID]),
    (f"{FIRST}.data: got ['video_grid_thw'], want an item", [feature("image", 0, 1, video_grid_thw=[1, 2, 2])]),
    (f"{FIRST}.data.image_grid_thw: got shape (1, 3), want (3,)", [feature("image", 0, 1, image_grid_thw=[[1, 2, 2]])]),
    (f"{FIRST}: got int, want the fields of a MultiModalFeatureSpec", [3]),
    (f"{FIRST}.modality: got 'audio', want one of 'image', 'video'", [feature("audio", 0, 2)]),
    ("documents[0][2]: got a grid right after a grid", [image(1, 1, 2), image(3, 1, 2)]),
    (f"{FIRST}.data: got 3, want an item with image_grid_thw", [SimpleNamespace(**vars(NO_GRID) | {"data": 3})]),
    (f"{FIRST}.data.image_grid_thw: got dtype object", [SimpleNamespace(**vars(NO_GRID) | {"data": RAW})]),
    ("mm_features: got None, want a sequence of features", NOTHING),
]  # fmt: skip


@pytest.mark.parametrize(("message", "features"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_features_are_refused(message: str, features: list[Any]) -> None:
    assert_refused(message, lambda: ids(20, features), MmposError)


def test_a_prompt_without_tokens_or_spans_is_refused() -> None:
    # as for prompts that were sent as embeddings
    ask = partial(mrope_input_positions, NOTHING, [], scheme="mrope", spatial_merge_size=2)
    assert_refused("input_tokens: got None, want the tokens of the prompt", ask, InvalidInputError)
    ask_apart = partial(check_apart, NOTHING, "rope-tie")
    assert_refused("mm_placeholders: got None, want the spans of each modality", ask_apart, InvalidInputError)


TIMED = mmpos.schemes.MRopeQwen25(2)


@pytest.mark.parametrize(
    ("seconds", "scheme", "error"),
    [
        (0.0, TIMED, InvalidInputError),
        (float("nan"), TIMED, InvalidInputError),
        (1e12, TIMED, LimitExceededError),
        (1.0, "rope-tie", UnsupportedError),
    ],
)
def test_errors_raised_for_a_request_are_value_errors(seconds: float, scheme: object, error: type[Exception]) -> None:
    video = feature("video", 1, 3, video_grid_thw=[3, 2, 2], second_per_grid_ts=seconds)
    with pytest.raises(ValueError, match="got") as refusal:  # engines catch ValueError and continue with other requests
        ids(5, [video], scheme)
    assert refusal.type is error


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("rope-tie-v2", "positions: got scheme 'rope-tie-v2', whose ids may be fractions, want integers; an id is"),
        ("rows", "next_positions: got document 0 of rows, whose end is not one whole id"),
        ("videorope", "positions: got id -3, want >= 0; ids are rows of the cos/sin cache"),
    ],
)
def test_schemes_without_rows_of_a_cache_are_refused(scheme: str, message: str) -> None:
    assert_refused(message, lambda: ids(64, [image(0, 8, 8)], scheme), MmposError)


def span(offset: int, length: int) -> Any:
    return SimpleNamespace(offset=offset, length=length)


def test_check_apart_refuses_adjacent_images() -> None:
    check_apart({"image": [span(8, 2), span(1, 4)], "video": [span(6, 1)]}, "rope-tie")
    adjacent = {"video": [span(5, 1)], "image": [span(8, 2), span(1, 4)]}
    message = "mm_placeholders: got an image at token 5 right after an image, want text between them in scheme 'rope-t"
    assert_refused(message, lambda: check_apart(adjacent, "rope-tie"))
    check_apart(adjacent, "naive-2d")
