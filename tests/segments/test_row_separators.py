"""Row separators, which follow the patches of every row, in sequences, batches, masks and shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import settled
from test_data_collate import by_loops, dense

from mmpos import (
    ByteTokenizer,
    Grid,
    ImageProcessor,
    ImageSize,
    InvalidInputError,
    Markers,
    SegmentTable,
    SequenceBuilder,
    Text,
    UnsupportedError,
    from_hf_config,
)
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Document, Example, Location, Piece, Preprocess
from mmpos.data.packing import Packer
from mmpos.integrations.hf import MMPosProcessor
from mmpos.segments import Audio, Placeholders
from mmpos.segments.kinds import AUDIO, CLIP, GRID, THUMBNAIL
from mmpos.segments.table import separator_tokens, token_types

NAMES = ("[IMG]", "[/IMG]", "[PATCH]", "[IMG_BREAK]")
BUILDER = SequenceBuilder(ByteTokenizer(NAMES), markers=Markers(row="[IMG_BREAK]"))
BEGIN, END, PATCH, ROW = 256, 257, 258, 259


def example(*pieces: tuple[Any, bool], builder: SequenceBuilder = BUILDER, **options: Any) -> Example:
    document = Document("r", tuple(Piece(*piece) for piece in pieces))
    return Preprocess(lambda record, location: document, builder, **options)({}, Location("s", 0))


def test_the_builder_puts_a_row_marker_after_every_row() -> None:
    """By hand, with L = 1 and K = 13: rows 5 and 9, columns 4, 7 and 10, and separators in column 13."""
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


def test_a_grid_with_row_separators_requires_a_row_marker() -> None:
    grid = Grid(2, 2, row_separator=True)
    assert BUILDER.build([grid]).input_ids.tolist() == BUILDER.build([Grid(2, 2)]).input_ids.tolist()
    with pytest.raises(UnsupportedError) as caught:
        SequenceBuilder().build(["a", grid])
    message = "parts[1]: got a grid with row separators, want one without, or a builder with Markers(row=…)"
    assert str(caught.value) == message


def test_separator_tokens_are_listed_for_every_table() -> None:
    video = Grid(2, 1, frames=2, row_separator=True)
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 2), video], [Grid(1, 2, row_separator=True)]])
    assert separator_tokens(segments).tolist() == [4, 6, 8, 10, 13]
    assert token_types(segments).tolist() == [0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0]
    assert separator_tokens(SegmentTable.from_documents([[Text(2)]])).tolist() == []


@pytest.mark.parametrize(
    ("kind", "grid", "extra", "tokens"),
    [(GRID, [2, 2, 1], 0, 8), (AUDIO, [1, 1, 3], 0, 3), (CLIP, [2, 2, 1], 2, 10), (THUMBNAIL, [1, 2, 3], 1, 9)],
)
def test_from_spans_gives_row_separators_only_to_grids(kind: int, grid: list[int], extra: int, tokens: int) -> None:
    """A clip has two markers on each side of its 4 patches and 2 audio tokens; a thumbnail has one on each side."""
    table = SegmentTable.from_spans([14], [1], [grid], row_separator=True, kind=[kind], extra_tokens=[extra])
    assert table.lengths.tolist() == [1, tokens, 13 - tokens]
    separators = None if table.row_separator is None else table.row_separator.tolist()
    assert separators == ([False, True, False] if kind == GRID else None)


def test_separators_have_labels_only_if_train_markers_is_set() -> None:
    parts = (("a", True), (Grid(2, 1), True), (Grid(1, 1), False))
    assert example(*parts).labels.tolist() == [97] + [-100] * 10
    with_markers = example(*parts, train_markers=True).labels.tolist()
    assert with_markers == [97, BEGIN, -100, ROW, -100, ROW, END] + [-100] * 4


def test_slices_of_an_example_keep_separators_and_seconds() -> None:
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
MARKED = Markers(row="[IMG_BREAK]", audio="[A]", audio_begin="<a", audio_end="a>")
SPOKEN = SequenceBuilder(ByteTokenizer((*NAMES, "<a", "[A]", "a>")), markers=MARKED)


def test_a_slice_with_audio_has_separators_only_in_grids() -> None:
    # [IMG] P P BREAK [/IMG] a b <a A A A a> c d
    whole = example((Grid(1, 2), True), ("ab", True), (Audio(3), True), ("cd", True), builder=SPOKEN)
    assert whole.slice(0, 14).sequence.segments.lengths.tolist() == [1, 3, 4, 3, 3]
    rest = whole.slice(6, 14).sequence.segments
    assert (rest.lengths.tolist(), rest.row_separator) == ([2, 3, 3], None)
    packer = Packer(8, split_text=True)
    packs = [*packer.add(whole), *packer.flush()]
    examples = [piece for pack in packs for piece in pack.examples]
    assert [piece.sequence.segments.num_tokens for piece in examples] == [piece.num_tokens for piece in examples]
    assert sum(piece.num_tokens for piece in examples) == 14


def test_a_batch_distinguishes_patches_from_separators() -> None:
    batch = PackedCollator(multiple_of=4)([FIRST, SECOND])
    assert batch.input_ids.tolist()[:12] == [97, 98, BEGIN, PATCH, PATCH, ROW, PATCH, PATCH, ROW, END, 99, 0]
    assert batch.image_spans.tolist() == [[3, 5], [6, 8], [13, 16]]
    assert batch.feature_spans.tolist() == [[0, 2], [2, 4], [4, 7]]
    tokens, rows = batch.image_tokens()
    assert (batch.input_ids[tokens] == PATCH).all()
    assert int((batch.input_ids == PATCH).sum()) == len(tokens) == 7
    assert rows.tolist() == list(range(7))
    assert [indices.tolist() for indices in FIRST.sequence.image_tokens()] == [[3, 4, 6, 7], [0, 1, 2, 3]]


some_documents = st.lists(
    st.lists(st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4)
)


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_connect_the_rows_of_an_image(side: Literal["left", "right"]) -> None:
    """The last separator of an image is treated like [/IMG]."""
    packed, padded = PackedCollator()([FIRST, SECOND]), PaddedCollator(side=side)([FIRST, SECOND])
    mask = dense(packed.mask_mod(bidirectional_images=True), packed)[0]
    assert torch.equal(mask, by_loops([11, 7], [11, 7], "right", [(3, 8), (12, 15)]))
    second = 5 if side == "left" else 1
    want = by_loops([11, 7], [11, 11], side, [(3, 8), (11 + second, 14 + second)])
    for row, part in enumerate(dense(padded.mask_mod(bidirectional_images=True), padded)):
        assert torch.equal(part, want[11 * row : 11 * row + 11, 11 * row : 11 * row + 11])


PIXTRAL_NAMES = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL = SequenceBuilder(
    ByteTokenizer(PIXTRAL_NAMES), scheme="flatten", markers=Markers(None, None, "[IMG]", "[IMG_BREAK]", "[IMG_END]")
)
IMG, BREAK, LAST = 256, 257, 258


def test_pixtral_images_have_no_margins_and_end_with_a_different_token() -> None:
    sequence = PIXTRAL.build(["a", Grid(2, 3), Grid(1, 1), "b"])
    image = [IMG, IMG, IMG, BREAK, IMG, IMG, IMG, LAST]
    assert sequence.input_ids.tolist() == [97, *image, IMG, LAST, 98]
    assert sequence.token_type_ids.tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0]
    assert sequence.positions.dense().tolist() == [list(range(12))]
    assert sequence.image_spans.tolist() == sequence.marked_spans.tolist() == [[1, 9], [9, 11]]
    assert sequence.image_margins == (0, 0)
    assert sequence.part_offsets.tolist() == [0, 1, 9, 11, 12]


around = st.sampled_from([(None, None), (254, None), (None, 255), (254, 255)])
rows = st.sampled_from([(257, None), (257, 258)])


@settings(settled, max_examples=40)
@given(around, rows, some_documents.filter(bool))
def test_rows_are_read_back_from_their_ids(ends: Any, separators: Any, documents: Any) -> None:
    """Whatever the markers, the table equals the builder's."""
    (begin, end), (row, last_row) = ends, separators
    builder = SequenceBuilder(scheme="flatten", markers=Markers(begin, end, 256, row, last_row))
    for document in documents:
        sequence = builder.build([[7] * part if isinstance(part, int) else Grid(*part) for part in document])
        table = SegmentTable.from_input_ids(sequence.input_ids, builder.marker_ids.placeholders, sequence.grid_thw)
        np.testing.assert_array_equal(table.extents, sequence.segments.extents)
        np.testing.assert_array_equal(table.row_separator, sequence.segments.row_separator)


def test_images_without_markers_have_no_labels_and_can_be_cut_and_packed() -> None:
    whole = example(("ab", True), (Grid(1, 2), True), (Grid(1, 1), False), ("cd", True), builder=PIXTRAL)
    assert whole.labels.tolist() == [97, 98, *[-100] * 5, 99, 100]
    trained = example((Grid(1, 2), True), builder=PIXTRAL, train_markers=True)
    assert trained.labels.tolist() == [-100, -100, LAST]
    for start, stop in ((0, 2), (2, 5), (5, 9)):
        part = whole.slice(start, stop).sequence
        assert part.input_ids.tolist() == whole.sequence.input_ids[start:stop].tolist()
        assert part.segments.num_tokens == stop - start
    with pytest.raises(InvalidInputError, match=r"^start: got 3 inside image 0, want it between parts$"):
        whole.slice(3, 9)
    packer = Packer(5, split_text=True, overlong="truncate")
    packs = [*packer.add(whole), *packer.flush()]
    assert sorted(piece.sequence.input_ids.tolist() for pack in packs for piece in pack.examples) == [
        [97, 98, IMG, IMG, LAST],
        [IMG, LAST, 99, 100],
    ]


# Transformers' PixtralProcessor, whose ids are 5 for a patch, 6 after a row and 7 after the last row.

SIZES = [(16, 16), (16, 64), (48, 16), (32, 48), (64, 64)]
TEXTS = ["What is [IMG] this?", "[IMG][IMG]", "A cat", "[IMG] a cup [IMG]"]


@pytest.mark.parametrize("merge", [1, 2])
def test_input_ids_equal_those_of_pixtral_and_are_parsed(merge: int) -> None:
    transformers = pytest.importorskip("transformers")
    from chat_tokenizer import chat_tokenizer  # requires tokenizers

    tokenizer = chat_tokenizer(PIXTRAL_NAMES)
    sizes = [(merge * height, merge * width) for height, width in SIZES]
    photos = [np.zeros((*size, 3), np.uint8) for size in sizes]
    images = transformers.PixtralImageProcessor(patch_size=16 * merge, size={"longest_edge": 1024})
    theirs = transformers.PixtralProcessor(images, tokenizer, patch_size=16, spatial_merge_size=merge)
    want = theirs([photos[:1], photos[1:3], [], photos[3:]], TEXTS, padding=True, return_tensors="np")

    ours = ImageProcessor("pillow", patch_size=16, spatial_merge_size=merge, min_pixels=0)
    processor = MMPosProcessor(tokenizer, ours, "flatten", PIXTRAL.markers)
    got = processor([ImageSize(*size) for size in sizes], TEXTS, padding=True, return_tensors="np")
    for key in ("input_ids", "attention_mask"):
        np.testing.assert_array_equal(got[key], want[key])
    np.testing.assert_array_equal(got["image_grid_thw"][:, 1:], want["image_sizes"] // 16)
    positions = processor.positions(want["input_ids"], got["image_grid_thw"], want["attention_mask"])
    np.testing.assert_array_equal(positions.dense().reshape(1, *want["input_ids"].shape), got["mm_position_ids"])

    builder = SequenceBuilder(tokenizer, ours, "flatten", PIXTRAL.markers)
    (expected,) = theirs(photos[:1], TEXTS[:1], add_special_tokens=False)["input_ids"].tolist()
    sequence = builder.build(["What is ", ImageSize(*sizes[0]), " this?"])
    assert sequence.input_ids.tolist() == expected
    segments = SegmentTable.from_input_ids(expected, Placeholders(image=5, rows=(6, 7)), sequence.grid_thw)
    np.testing.assert_array_equal(segments.extents, sequence.segments.extents)


@pytest.mark.parametrize("model", ["Mistral3Config", "LlavaConfig"])
def test_settings_read_from_a_config_include_pixtrals_row_markers(model: str) -> None:
    transformers = pytest.importorskip("transformers")
    text, vision = transformers.MistralConfig(), transformers.PixtralVisionConfig()
    config = getattr(transformers, model)(text_config=text, vision_config=vision, image_token_index=5)
    settings = from_hf_config(config)
    assert settings.markers == Markers(None, None, 5, "[IMG_BREAK]", "[IMG_END]")
    sides, rows = np.array([1, 2, 3]) * [1, *[settings.spatial_merge_size] * 2], [5, 5, 5, 6, 5, 5, 5, 7]
    assert settings.segments(rows, [sides], rows=(6, 7)).extents.T.tolist() == [[1, 2, 3]]
