"""Examples: labels follow the pieces, slices cut no image, audio or clip, and errors name the record."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from omni import AUDIO_BEGIN, AUDIO_END, BEGIN, CLIP, END
from omni import BUILDER as OMNI
from results import assert_equal

from mmpos import Grid, ImageProcessor, InvalidInputError, Markers, SequenceBuilder, UnsupportedError, Video, place
from mmpos.data.batch import Batch
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Document, Example, ImageError, Location, OnImageError, Piece, Preprocess, RecordError
from mmpos.data.packing import Packer
from mmpos.errors import ServiceUnavailableError
from mmpos.segments.kinds import Audio, Segment, Text, Thumbnail, Tile
from mmpos.segments.table import SegmentTable
from mmpos.sequence.builder import InterleavedSequence

HERE = Location("shard.jsonl", 3)
BUILDER = SequenceBuilder(images=ImageProcessor("pillow", patch_size=4, min_pixels=64))
PHOTO = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)


def pieces(record: Mapping[str, Any], location: Location) -> Document:
    """Format of records that contain a list of (part, train) pairs."""
    return Document("r7", tuple(Piece(part, train) for part, train in record["pieces"]))


def example(*parts: tuple[object, bool], builder: SequenceBuilder = BUILDER, **options: Any) -> Example:
    return Preprocess(pieces, builder, **options)({"pieces": parts}, HERE)


spoken = partial(example, builder=OMNI)


BROKEN = b"no picture"
WHOLE = example(("ab", True), (Grid(1, 3), True), ("c", True))
WRONG: Any = 3
AT = "r7 (shard.jsonl[3]): "


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: WHOLE.slice(2, 2), InvalidInputError, "stop: got 2, want >= 3"),
        (lambda: WHOLE.slice(0, 9), InvalidInputError, "stop: got 9, want <= 8"),
        (lambda: example(), RecordError, "r7: got no parts, want at least one"),
        (lambda: example(("a", True), (BROKEN, True)), RecordError, f"{AT}parts[1]: image: got a file"),
        (lambda: example(("", True)), RecordError, f"{AT}parts: got no tokens, want at least one"),
        (lambda: example(("a", False), ("b", WRONG)), InvalidInputError, "r7: pieces[1].train: got 3, want True or F"),
        (lambda: Document("r7", (WRONG,)), InvalidInputError, "r7: pieces[0]: got int, want a Piece"),
        (lambda: Preprocess(lambda *_: WRONG, BUILDER)({}, Location("shard.jsonl", 3)), InvalidInputError,
         "format: got int for shard.jsonl[3], want a Document"),
        (lambda: Preprocess(WRONG, BUILDER), InvalidInputError,
         "format: got int, want a callable that takes a record and a location"),
        (lambda: Preprocess(pieces, WRONG), InvalidInputError,
         "builder: got int, want an object with a build method"),
        (lambda: Example("r7", BUILDER.build(["ab"]), np.array([-100])), InvalidInputError,
         "r7: labels: got shape (1,), want (2,), the shape of input_ids"),
        (lambda: example(("a", True), on_image_error="skip"), InvalidInputError,
         "on_image_error: got 'skip', want one of 'drop', 'skip-document', 'raise', None"),
        (lambda: Preprocess(pieces, SequenceBuilder(), on_image_error="drop"), InvalidInputError,
         "on_image_error: got 'drop' with a builder that reads no images, want"),
        (lambda: example((Audio(1), True)), UnsupportedError, f"{AT}parts[0]: got Audio, want a builder with"),
        (lambda: example((BROKEN, True), (Audio(1), True), on_image_error="drop"), UnsupportedError,
         f"{AT}parts[0]: got Audio, want a builder with"),
        *((lambda policy=policy: example((PHOTO, True), ([258], True), on_image_error=policy), RecordError,
           f"{AT}parts[1]: got the patch marker's id 258") for policy in ("drop", "skip-document", "raise")),
    ],
)  # fmt: skip
def test_errors_name_the_argument_or_the_record_and_part(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedError)) as refused:
        call()
    assert type(refused.value) is error  # not an ImageError, which has its own policy
    assert str(refused.value).startswith(message)


def test_an_unreadable_image_is_dropped_with_its_markers() -> None:
    pieces = [("a", True), (BROKEN, True), ("b", True), ("c", False), (PHOTO, True), (BROKEN, False), ("d", True)]
    got = example(*pieces, on_image_error="drop")
    want = example(("ab", True), ("c", False), (PHOTO, True), ("d", True))
    assert got.sequence.input_ids.tolist() == want.sequence.input_ids.tolist()
    assert got.labels.tolist() == want.labels.tolist()
    # The texts around a dropped image become one part.
    assert got.sequence.part_offsets.tolist() == want.sequence.part_offsets.tolist()
    first, second = got.dropped_images
    assert first.startswith("r7 (shard.jsonl[3]): parts[1]: image: got ")
    assert second.startswith("r7 (shard.jsonl[3]): parts[5]: image: got ")
    assert want.dropped_images == example(*pieces[:1], on_image_error="drop").dropped_images == ()


@pytest.mark.parametrize(
    ("policy", "texts", "on_error"), [("raise", 1, "raise"), ("skip-document", 1, "skip"), ("drop", 0, "skip")]
)
def test_an_image_error_carries_the_image_policy(policy: OnImageError, texts: int, on_error: str) -> None:
    with pytest.raises(ImageError, match=rf"^r7 \(shard\.jsonl\[3\]\): parts\[{texts}\]: image: got ") as refused:
        example(*[("a", True)] * texts, (BROKEN, True), (BROKEN, True), on_image_error=policy)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.on_error, refused.value.on_error, str(again)) == (on_error, on_error, str(refused.value))


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_an_unavailable_server_is_neither_a_record_error_nor_an_image_error(policy: OnImageError) -> None:
    class Unavailable:
        def build(self, parts: object) -> Any:
            if len(parts) > 1 and policy == "drop":  # type: ignore[arg-type]
                raise InvalidInputError("parts[0]: image: broken")
            raise ServiceUnavailableError("away")

    with pytest.raises(ServiceUnavailableError, match="away"):
        Preprocess(pieces, Unavailable(), on_image_error=policy)({"pieces": [(PHOTO, True), ("a", True)]}, HERE)


SPOKEN = spoken(("ab", False), (Audio(2), True), ("cd", True), (CLIP, True), (Grid(1, 1), False), ("e", True))
"""a b <a A A a> c d <v <a V V A A V V A a> v> <v I v> e"""


def test_labels_leave_out_untrained_pieces_patches_audio_and_unless_asked_for_markers() -> None:
    got = example(("ab", False), ("c", True), (Grid(1, 2), True), ("d", True), ("", False), ([7], False))
    assert got.sequence.input_ids.tolist() == [97, 98, 99, 256, 258, 258, 257, 100, 7]
    assert got.labels.tolist() == [-100, -100, 99, -100, -100, -100, -100, 100, -100]
    assert (got.key, got.num_tokens) == ("r7", 9)
    for train, label in ((True, ord("t")), (False, -100)):  # of a timestamp
        video = example(("a", True), (Video([Grid(1, 1)], times=[0], timestamp="t"), train), ("b", True))
        assert video.labels.tolist() == [97, label, -100, -100, -100, 98]
    assert SPOKEN.labels.tolist() == [*[-100] * 6, 99, 100, *[-100] * 14, 101]
    pieces = ((Audio(2), True), (CLIP, True), (Audio(1), False))
    marked = spoken(*pieces, train_markers=True).labels.tolist()
    clip = [BEGIN, AUDIO_BEGIN, *[-100] * 7, AUDIO_END, END]
    assert marked == [AUDIO_BEGIN, -100, -100, AUDIO_END, *clip, *[-100] * 3]


PHOTOS = example(("abc", True), (PHOTO, True), ("de", False), (PHOTO[:8], True), ("f", True))
BARE = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256))
MARKERLESS = example((Grid(1, 2), True), ("a", True), builder=BARE)


@pytest.mark.parametrize(
    ("whole", "builder", "start", "stop", "parts"),
    [
        (SPOKEN, OMNI, 0, 23, ["ab", Audio(2), "cd", CLIP, Grid(1, 1), "e"]),
        (SPOKEN, OMNI, 1, 19, ["b", Audio(2), "cd", CLIP]),
        (SPOKEN, OMNI, 2, 6, [Audio(2)]),
        (SPOKEN, OMNI, 7, 22, ["d", CLIP, Grid(1, 1)]),
        (SPOKEN, OMNI, 22, 23, ["e"]),
        (PHOTOS, BUILDER, 0, 2, ["ab"]),
        (PHOTOS, BUILDER, 2, 12, ["c", PHOTO, "d"]),
        (PHOTOS, BUILDER, 12, 19, ["e", PHOTO[:8], "f"]),
        (MARKERLESS, BARE, 0, 2, [Grid(1, 2)]),
        (MARKERLESS, BARE, 2, 3, ["a"]),
    ],
)
def test_a_slice_matches_a_sequence_of_its_parts_except_for_positions(
    whole: Example, builder: SequenceBuilder, start: int, stop: int, parts: list[object]
) -> None:
    part, want = whole.slice(start, stop).sequence, builder.build(parts)
    assert_equal(replace(part, positions=want.positions), want)
    np.testing.assert_array_equal(whole.slice(start, stop).labels, whole.labels[start:stop])
    np.testing.assert_array_equal(part.positions.dense(), whole.sequence.positions.dense()[:, start:stop])
    np.testing.assert_array_equal(part.positions.token_types(part.segments), part.token_type_ids)


def spans(batch: Batch) -> dict[str, Any]:
    names = ("image_spans", "feature_spans", "audio_spans", "audio_feature_spans")
    return {name: None if (tensor := getattr(batch, name)) is None else tensor.tolist() for name in names}


def test_a_packed_batch_maps_features_to_tokens() -> None:
    batch = PackedCollator()([SPOKEN, spoken(("a", True)), spoken((Audio(1), True), (Grid(1, 2), True))])
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
    moved: Any = batch.to("meta")
    assert moved.audio_spans.is_meta


def test_the_spans_of_audio_account_for_padding_and_are_absent_without_audio() -> None:
    audio = [spoken((Audio(2), True)), spoken(("a", True), (Audio(1), True), ("bc", True))]
    assert spans(PaddedCollator(side="left")(audio))["audio_spans"] == [[3, 5], [8, 9]]
    batch = PackedCollator()([spoken(("a", True), (Grid(1, 2), True))])
    assert (batch.audio_spans, batch.audio_feature_spans) == (None, None)
    assert "audio_spans" not in batch.as_dict()
    assert [tensor.tolist() for tensor in batch.audio_tokens()] == [[], []]
    assert spans(PackedCollator()([spoken(("a", True), (Audio(1), True))]))["image_spans"] == []


def test_ranks_receive_the_features_of_their_tokens() -> None:
    batch = PackedCollator(multiple_of=4)([SPOKEN, spoken((Audio(3), True))])
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
    return Example("r7", sequence, np.arange(24))


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
    [(SPOKEN, [8, 11, 4], 11), (TILED, [2, 12, 10], 12), (spoken((Audio(2), True)), [4], 4)],
)
def test_packs_do_not_cut_a_part(whole: Example, sizes: list[int], least: int) -> None:
    packer = Packer(12, split_text=True)
    packs = [*packer.add(whole), *packer.flush()]
    assert [[item.num_tokens for item in pack.examples] for pack in packs] == [[size] for size in sizes]
    message = f"^r7: (audio|image) 0: got {least} tokens with its markers, want at most {least - 1}, or"
    with pytest.raises(RecordError, match=message):
        Packer(least - 1, split_text=True).add(whole)


def test_slices_keep_thumbnails_and_tiles() -> None:
    part: Any = TILED.slice(1, 15).sequence
    want = SegmentTable.from_documents([[Text(1), Thumbnail(1, 1), Tile(1, 2, tokens_after=1), Tile(1, 2), Text(1)]])
    assert repr(vars(part.segments)) == repr(vars(want))
    assert part.positions.dense().tolist() == TILED.sequence.positions.dense()[:, 1:15].tolist()
    assert part.token_type_ids.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert part.image_spans.tolist() == [[2, 3], [5, 7], [10, 12]]
    assert part.patches.ravel().tolist() == [0, 1, 2, 3, 4]
    assert TILED.slice(19, 24).sequence.image_hashes == ("e",)


def test_images_with_tiles_are_collated() -> None:
    batch: Any = PackedCollator()([TILED, TILED.slice(14, 24)])
    assert spans(batch)["image_spans"] == [[3, 4], [6, 8], [11, 13], [16, 17], [20, 22], [26, 27], [30, 32]]
    assert batch.grid_thw.tolist() == [[1, 1, n] for n in (1, 2, 2, 1, 2, 1, 2)]
    assert batch.patches.ravel().tolist() == [*range(8), 5, 6, 7]
