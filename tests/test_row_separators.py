"""Row separators: a token after the patches of every row, from the builder to batches, masks and shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import exact, settled
from test_data_masks import by_loops, dense
from test_tokenizers import trained_bpe

from mmpos import (
    ByteTokenizer,
    Grid,
    ImageProcessor,
    InvalidInputError,
    Markers,
    SegmentTable,
    SequenceBuilder,
    Text,
    UnsupportedError,
    Video,
)
from mmpos.data.batches.collate import collate_packed, collate_padded
from mmpos.data.documents import Document, Location, Piece
from mmpos.data.examples import Example, Preprocess
from mmpos.data.storing.storage_rows import SCHEMA, from_row, to_row
from mmpos.separators import patch_spans, separator_tokens, token_types

NAMES = ("[IMG]", "[/IMG]", "[PATCH]", "[IMG_BREAK]")
BUILDER = SequenceBuilder(ByteTokenizer(NAMES), markers=Markers(row="[IMG_BREAK]"))
BEGIN, END, PATCH, ROW = 256, 257, 258, 259


def example(*pieces: tuple[Any, bool], builder: SequenceBuilder = BUILDER, **options: bool) -> Example:
    document = Document("r", tuple(Piece(*piece) for piece in pieces))
    return Preprocess(lambda record, location: document, builder, **options)({}, Location("s", 0))


def test_a_row_marker_stands_after_the_patches_of_every_row() -> None:
    """L = 1, K = 13: rows 5, 9 and columns 4, 7, 10 and 13 of the separators."""
    sequence = BUILDER.build(["a", Grid(2, 3), "b"])
    assert sequence.input_ids.tolist() == [97, BEGIN, *[PATCH] * 3, ROW, *[PATCH] * 3, ROW, END, 98]
    assert sequence.token_type_ids.tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    assert sequence.positions.dense().tolist() == [
        [0, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 14],
        [0, 1, 4, 7, 10, 13, 4, 7, 10, 13, 13, 14],
    ]
    assert sequence.image_spans.tolist() == [[2, 10]]
    assert sequence.grid_thw.tolist() == [[1, 2, 3]]
    assert sequence.part_offsets.tolist() == [0, 1, 11, 12]
    assert sequence.segments.row_separator is not None
    assert sequence.segments.row_separator.tolist() == [False, True, False]


def test_photographs_and_videos_have_them_too_and_as_many_patches_as_without() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
    images = ImageProcessor("pillow", patch_size=4, min_pixels=64)
    parts = [photo, Video([photo[:8], photo], times=[0, 1], timestamp="t")]
    plain, separated = (replace(one, images=images).build(parts) for one in (SequenceBuilder(), BUILDER))
    np.testing.assert_array_equal(separated.patches, plain.patches)
    np.testing.assert_array_equal(separated.grid_thw, plain.grid_thw)
    np.testing.assert_array_equal(separated.input_ids[separated.input_ids != ROW], plain.input_ids)
    at_patches = [exact(one.positions.keep(one.token_type_ids == 1)) for one in (plain, separated)]
    assert at_patches[0] == at_patches[1]


@pytest.mark.parametrize("scheme", ["rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "flatten"])
def test_sequences_of_every_scheme_with_them(scheme: str) -> None:
    sequence = replace(BUILDER, scheme=scheme).build([Grid(2, 2), Grid(1, 1)])
    expected = [BEGIN, PATCH, PATCH, ROW, PATCH, PATCH, ROW, END, BEGIN, PATCH, ROW, END]
    assert sequence.input_ids.tolist() == expected
    assert sequence.positions.num_tokens == 12


def test_schemes_without_them_refuse() -> None:
    with pytest.raises(UnsupportedError, match=r"^documents\[0\]\[1\]: got a grid with row separators, want none in"):
        replace(BUILDER, scheme="mrope").build([Grid(2, 2)])


def test_a_grid_with_row_separators_wants_a_marker_for_them() -> None:
    grid = Grid(2, 2, row_separator=True)
    assert BUILDER.build([grid]).input_ids.tolist() == BUILDER.build([Grid(2, 2)]).input_ids.tolist()
    with pytest.raises(InvalidInputError) as refused:
        SequenceBuilder().build(["a", grid])
    message = "parts[1]: got a grid with row separators, want one without, or a builder with Markers(row=…)"
    assert str(refused.value) == message


def test_a_row_marker_in_user_text_stays_text() -> None:
    tokenizer = trained_bpe()
    tokenizer.add_special_tokens(["[IMG_BREAK]"])
    for each in (tokenizer, ByteTokenizer(NAMES)):
        builder = replace(BUILDER, tokenizer=each)
        ids = builder.build(["a [IMG_BREAK] b"]).input_ids.tolist()
        assert builder.marker_ids[3] not in ids
        assert builder.tokenizer.decode(ids) == "a [IMG_BREAK] b"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[X]", r"markers.row: got '\[X\]', want a token that is one id of the tokenizer"),
        (257, "markers: got ids 256, 257, 258 and 257, want four different ids"),
    ],
)
def test_row_markers_that_are_no_ids_of_their_own_are_refused(row: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        SequenceBuilder(markers=Markers(row=row))


def test_separators_of_any_table() -> None:
    video = Grid(2, 1, frames=2, row_separator=True)
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 2), video], [Grid(1, 2, row_separator=True)]])
    assert separator_tokens(segments).tolist() == [4, 6, 8, 10, 13]
    assert token_types(segments).tolist() == [0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0]
    assert separator_tokens(SegmentTable.from_documents([[Text(2)]])).tolist() == []


def test_spans_of_patches_are_those_of_rows_where_rows_end_in_separators() -> None:
    spans, grids = np.array([[1, 7], [9, 17], [20, 22]]), np.array([[1, 2, 3], [2, 2, 1], [1, 1, 1]])
    want = [[1, 7], [9, 10], [11, 12], [13, 14], [15, 16], [20, 21]]
    assert patch_spans(spans, grids).tolist() == want


def test_separators_are_labels_only_as_markers_are() -> None:
    parts = (("a", True), (Grid(2, 1), True), (Grid(1, 1), False))
    assert example(*parts).labels.tolist() == [97] + [-100] * 10
    with_markers = example(*parts, train_markers=True).labels.tolist()
    assert with_markers == [97, BEGIN, -100, ROW, -100, ROW, END] + [-100] * 4


def test_a_slice_of_an_example_keeps_separators_and_seconds() -> None:
    timed = Grid(1, 2, frames=2, seconds_per_frame=0.5)
    whole = example(
        ("abc", True), (timed, True), ("de", True), (Grid(1, 1), True), builder=replace(BUILDER, scheme="flatten")
    )
    for start, stop in ((1, 13), (12, 17), (0, 2)):
        part = whole.slice(start, stop).sequence
        np.testing.assert_array_equal(part.token_type_ids, token_types(part.segments))
        assert part.segments.num_tokens == stop - start
    first, second = whole.slice(1, 13).sequence, whole.slice(12, 17).sequence
    assert first.segments.seconds_per_frame is not None
    assert first.segments.seconds_per_frame.tolist() == [[0, 1, 0], [1, 2, 1]]
    assert second.segments.row_separator is not None
    assert second.segments.row_separator.tolist() == [False, True, False]


FIRST = example(("ab", True), (Grid(2, 2), True), ("c", True))
SECOND = example((Grid(1, 3), True), ("d", True))


def test_a_batch_knows_patches_from_separators() -> None:
    batch = collate_packed([FIRST, SECOND], multiple_of=4)
    assert batch.input_ids.tolist()[:12] == [97, 98, BEGIN, PATCH, PATCH, ROW, PATCH, PATCH, ROW, END, 99, 0]
    assert batch.image_spans.tolist() == [[3, 5], [6, 8], [13, 16]]
    assert batch.feature_spans.tolist() == [[0, 2], [2, 4], [4, 7]]
    tokens, rows = batch.image_tokens()
    assert (batch.input_ids[tokens] == PATCH).all()
    assert int((batch.input_ids == PATCH).sum()) == len(tokens) == 7
    assert rows.tolist() == list(range(7))


some = st.lists(st.lists(st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4))


def examples_of(documents: list[list[int | tuple[int, int]]]) -> list[Example]:
    found = [[[7] * part if isinstance(part, int) else Grid(*part) for part in parts] for parts in documents]
    return [example(*((part, True) for part in parts)) for parts in found]


@settings(settled, max_examples=8)
@given(some.filter(lambda given: 0 < len(given) <= 3), st.sampled_from(["left", "right"]))
def test_masks_join_the_rows_of_an_image(documents: Any, side: Literal["left", "right"]) -> None:
    examples = examples_of(documents)
    packed, padded = collate_packed(examples), collate_padded(examples, side=side)
    lengths = [one.num_tokens for one in examples]
    for batch, sizes in ((packed, lengths), (padded, [max(lengths)] * len(lengths))):
        begins = np.cumsum(sizes) - sizes + (np.subtract(sizes, lengths) if side == "left" else 0)
        spans = [
            (begin + first, begin + stop - 1)  # the separator of the last row is as [/IMG]
            for begin, one in zip(begins.tolist(), examples, strict=True)
            for first, stop in one.sequence.image_spans.tolist()
        ]
        want = by_loops(lengths, sizes, side, spans)
        found = dense(batch.mask_mod(bidirectional_images=True), batch)
        if batch.packed:
            assert torch.equal(found[0], want)
        else:
            rows = len(lengths)
            for row, each in enumerate(want.reshape(rows, sizes[0], rows, sizes[0])):
                assert torch.equal(found[row], each[:, row])


@settings(settled, max_examples=10)
@given(some.filter(lambda given: 0 < len(given) <= 3), st.sampled_from([1, 2, 3]))
def test_shards_place_every_feature_once(documents: Any, world_size: int) -> None:
    batch = collate_packed(examples_of(documents), multiple_of=2 * world_size)
    ids = torch.arange(batch.input_ids.numel())
    placed: dict[int, int] = {}
    for rank in range(world_size):
        shard = batch.shard(rank, world_size)
        columns = ids[torch.from_numpy(batch.positions.shard_indices(rank, world_size))]
        tokens, rows = shard.image_tokens()
        placed |= dict(zip(columns[tokens].tolist(), rows.tolist(), strict=True))
    tokens, rows = batch.image_tokens()
    assert placed == dict(zip(tokens.tolist(), rows.tolist(), strict=True))
    assert sorted(placed) == (batch.input_ids == PATCH).nonzero().flatten().tolist()


def test_a_stored_example_knows_patches_from_separators() -> None:
    import pyarrow as pa

    table = pa.Table.from_pylist([to_row(FIRST)], SCHEMA)
    again = from_row({name: table[name][0] for name in table.column_names}, axes=2).sequence
    np.testing.assert_array_equal(again.token_type_ids, FIRST.sequence.token_type_ids)
    np.testing.assert_array_equal(again.segments.row_separator, FIRST.sequence.segments.row_separator)
