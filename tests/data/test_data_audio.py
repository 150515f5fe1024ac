"""Audio, clips, thumbnails and tiles: in examples, slices, packs, stored sequences and batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omni import AUDIO_BEGIN, AUDIO_END, BEGIN, BUILDER, CLIP, END
from results import assert_equal

from mmpos import Grid, InterleavedSequence, InvalidInputError, SegmentTable, Text, place
from mmpos.data import Batch, Document, Example, Location, Piece, Preprocess, RecordError, SequenceShard, SequenceWriter
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.packing import Packer
from mmpos.segments import Audio, Thumbnail, Tile
from mmpos.segments.kinds import Segment

HERE = Location("shard.jsonl", 0)
IGNORED = -100


def example(*pieces: tuple[object, bool], **options: Any) -> Example:
    document = Document("r", tuple(Piece(part, train) for part, train in pieces))
    return Preprocess(lambda record, location: document, BUILDER, **options)({}, HERE)


SPOKEN = example(("ab", False), (Audio(2), True), ("cd", True), (CLIP, True), (Grid(1, 1), False), ("e", True))
"""a b <a A A a> c d <v <a V V A A V V A a> v> <v I v> e"""


def test_patches_and_audio_are_never_labels_and_markers_are_labels_only_with_train_markers() -> None:
    assert SPOKEN.labels.tolist() == [*[IGNORED] * 6, 99, 100, *[IGNORED] * 14, 101]
    pieces = ((Audio(2), True), (CLIP, True), (Audio(1), False))
    marked = example(*pieces, train_markers=True).labels.tolist()
    clip = [BEGIN, AUDIO_BEGIN, *[IGNORED] * 7, AUDIO_END, END]
    assert marked == [AUDIO_BEGIN, IGNORED, IGNORED, AUDIO_END, *clip, *[IGNORED] * 3]


@pytest.mark.parametrize(
    ("start", "stop", "parts"),
    [
        (0, 23, ["ab", Audio(2), "cd", CLIP, Grid(1, 1), "e"]),
        (0, 8, ["ab", Audio(2), "cd"]),
        (1, 19, ["b", Audio(2), "cd", CLIP]),
        (2, 6, [Audio(2)]),
        (7, 22, ["d", CLIP, Grid(1, 1)]),
        (19, 23, [Grid(1, 1), "e"]),
        (22, 23, ["e"]),
    ],
)
def test_a_slice_matches_a_sequence_of_its_parts_except_for_positions(
    start: int, stop: int, parts: list[object]
) -> None:
    part = SPOKEN.slice(start, stop).sequence
    want = BUILDER.build(parts)
    assert_equal(replace(part, positions=want.positions), want)
    np.testing.assert_array_equal(part.positions.dense(), SPOKEN.sequence.positions.dense()[:, start:stop])
    np.testing.assert_array_equal(part.positions.token_types(part.segments), part.token_type_ids)


def spans(batch: Batch) -> dict[str, Any]:
    names = ("image_spans", "feature_spans", "audio_spans", "audio_feature_spans")
    return {name: None if (tensor := getattr(batch, name)) is None else tensor.tolist() for name in names}


def test_a_packed_batch_maps_features_to_tokens() -> None:
    batch = PackedCollator()([SPOKEN, example(("a", True)), example((Audio(1), True), (Grid(1, 2), True))])
    assert spans(batch) == {
        "image_spans": [[10, 12], [14, 16], [20, 21], [28, 30]],
        "feature_spans": [[0, 2], [2, 4], [4, 5], [5, 7]],
        "audio_spans": [[3, 5], [12, 14], [16, 17], [25, 26]],
        "audio_feature_spans": [[0, 2], [2, 4], [4, 5], [5, 6]],
    }
    tokens, rows = batch.audio_tokens()
    assert (tokens.tolist(), rows.tolist()) == ([3, 4, 12, 13, 16, 25], [0, 1, 2, 3, 4, 5])
    tokens, rows = batch.image_tokens()
    assert (tokens.tolist(), rows.tolist()) == ([10, 11, 14, 15, 20, 28, 29], [0, 1, 2, 3, 4, 5, 6])
    alone = SPOKEN.sequence.image_tokens()
    assert [indices.tolist() for indices in alone] == [[10, 11, 14, 15, 20], [0, 1, 2, 3, 4]]
    assert batch.as_dict()["audio_spans"] is batch.audio_spans
    moved = batch.to("meta")
    assert moved.audio_spans is not None
    assert moved.audio_spans.is_meta


def test_the_spans_of_audio_account_for_padding_and_are_absent_without_audio() -> None:
    audio = [example((Audio(2), True)), example(("a", True), (Audio(1), True), ("bc", True))]
    assert spans(PaddedCollator(side="left")(audio))["audio_spans"] == [[3, 5], [8, 9]]
    batch = PackedCollator()([example(("a", True), (Grid(1, 2), True))])
    assert (batch.audio_spans, batch.audio_feature_spans) == (None, None)
    assert "audio_spans" not in batch.as_dict()
    assert [tensor.tolist() for tensor in batch.audio_tokens()] == [[], []]
    assert spans(PackedCollator()([example(("a", True), (Audio(1), True))]))["image_spans"] == []


def test_ranks_receive_the_features_of_their_tokens() -> None:
    batch = PackedCollator(multiple_of=4)([SPOKEN, example((Audio(3), True))])
    audio = torch.arange(8)  # one feature per row: 2 + 2 + 1 in the first document, 3 in the second
    scattered = torch.full((batch.input_ids.numel(),), -1)
    tokens, rows = batch.audio_tokens()
    scattered[tokens] = audio[rows]
    for layout in ("zigzag", "contiguous-sequence"):
        for rank in range(2):
            part = batch.shard(rank, 2, layout)
            ours = torch.full((part.input_ids.numel(),), -1)
            tokens, rows = part.audio_tokens()
            ours[tokens] = audio[rows]
            assert ours.tolist() == scattered[batch.positions.shard_indices(rank, 2, layout)].tolist()


def _tiled() -> Example:
    """Make the sequence ab <T> <T T> newline <T T> c [IMG] I [/IMG] d <T T> newline, like MiniCPM-V's processor."""
    image: list[Segment] = [Thumbnail(1, 1), Tile(1, 2, tokens_after=1), Tile(1, 2)]
    segments = SegmentTable.from_documents(
        [[Text(2), *image, Text(2), Grid(1, 1), Text(2), Thumbnail(1, 2, tokens_after=1)]]
    )
    positions = place(segments, "mrope-canvas")
    grids = segments.extents[:, segments.kind != 0].T
    sequence = InterleavedSequence(
        input_ids=np.arange(24),
        token_type_ids=positions.token_types(segments),
        segments=segments,
        positions=positions,
        patches=np.arange(8, dtype=np.float32)[:, None],
        grid_thw=grids,
        image_spans=np.array([[3, 4], [6, 8], [11, 13], [16, 17], [20, 22]]),
        image_hashes=("a", "b", "c", "d", "e"),
        part_offsets=np.array([0, 24]),
    )
    return Example("r", sequence, np.arange(24))


TILED = _tiled()


@pytest.mark.parametrize(
    ("whole", "edges"),
    [
        (SPOKEN, {3: "audio 0", 5: "audio 0", 9: "image 0", 18: "image 0", 20: "image 1"}),
        (TILED, {3: "image 0", 5: "image 0", 10: "image 0", 13: "image 0", 16: "image 3", 23: "image 4"}),
    ],
)
def test_a_cut_through_a_part_is_refused(whole: Example, edges: dict[int, str]) -> None:
    for edge, name in edges.items():
        for start, stop, which in ((edge, whole.num_tokens, "start"), (0, edge, "stop")):
            with pytest.raises(InvalidInputError, match=f"^{which}: got {edge} inside {name}, want it between parts$"):
                whole.slice(start, stop)


@pytest.mark.parametrize(
    ("whole", "sizes", "least"),
    [(SPOKEN, [8, 11, 4], 11), (TILED, [2, 12, 10], 12), (example((Audio(2), True)), [4], 4)],
)
def test_packs_do_not_cut_a_part(whole: Example, sizes: list[int], least: int) -> None:
    packer = Packer(12, split_text=True)
    packs = [*packer.add(whole), *packer.flush()]
    assert [[item.num_tokens for item in pack.examples] for pack in packs] == [[size] for size in sizes]
    message = f"^r: (audio|image) 0: got {least} tokens with its markers, want at most {least - 1}, or"
    with pytest.raises(RecordError, match=message):
        Packer(least - 1, split_text=True).add(whole)


@pytest.mark.parametrize("examples", [[example(("a", True)), example((Audio(1), True)), SPOKEN], [TILED]])
def test_stored_examples_are_read_back(examples: list[Example], tmp_path: Path) -> None:
    with SequenceWriter(tmp_path / "s.parquet") as writer:
        for item in examples:
            writer.write(item)
    assert_equal(list(SequenceShard(tmp_path / "s.parquet").examples()), examples)


def test_slices_keep_thumbnails_and_tiles() -> None:
    part = TILED.slice(1, 15).sequence
    want = SegmentTable.from_documents([[Text(1), Thumbnail(1, 1), Tile(1, 2, tokens_after=1), Tile(1, 2), Text(1)]])
    assert repr(vars(part.segments)) == repr(vars(want))
    assert part.positions.dense().tolist() == TILED.sequence.positions.dense()[:, 1:15].tolist()
    assert part.token_type_ids.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert part.image_spans.tolist() == [[2, 3], [5, 7], [10, 12]]
    assert part.patches is not None
    assert part.patches.ravel().tolist() == [0, 1, 2, 3, 4]
    assert TILED.slice(19, 24).sequence.image_hashes == ("e",)


def test_images_with_tiles_are_collated() -> None:
    batch = PackedCollator()([TILED, TILED.slice(14, 24)])
    assert spans(batch)["image_spans"] == [[3, 4], [6, 8], [11, 13], [16, 17], [20, 22], [26, 27], [30, 32]]
    assert batch.grid_thw.tolist() == [[1, 1, n] for n in (1, 2, 2, 1, 2, 1, 2)]
    assert batch.patches is not None
    assert batch.patches.ravel().tolist() == [*range(8), 5, 6, 7]
