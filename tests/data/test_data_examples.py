"""Examples: labels follow the pieces, slices keep position ids and do not cut images, and errors name the record."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mmpos import Grid, ImageProcessor, InvalidInputError, SequenceBuilder, UnsupportedError
from mmpos.data.examples import (
    IGNORE_INDEX,
    Document,
    Example,
    ImageError,
    Location,
    OnImageError,
    Piece,
    Preprocess,
    RecordError,
)
from mmpos.errors import ServiceUnavailableError
from mmpos.segments.kinds import Audio

HERE = Location("shard.jsonl", 3)
BUILDER = SequenceBuilder(images=ImageProcessor("pillow", patch_size=4, min_pixels=64))
PHOTO = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)


@dataclass(frozen=True)
class Pieces:
    """Format for records that contain a list of (part, train) pairs."""

    def __call__(self, record: Mapping[str, Any], location: Location) -> Document:
        return Document("r7", tuple(Piece(part, train) for part, train in record["pieces"]))


def example(*pieces: tuple[object, bool], **options: Any) -> Example:
    return Preprocess(Pieces(), BUILDER, **options)({"pieces": pieces}, HERE)


def test_untrained_pieces_patches_and_markers_have_no_labels() -> None:
    got = example(("ab", False), ("c", True), (Grid(1, 2), True), ("d", True), ("", False), ([7], False))
    assert got.sequence.input_ids.tolist() == [97, 98, 99, 256, 258, 258, 257, 100, 7]
    assert got.labels.tolist() == [-100, -100, 99, -100, -100, -100, -100, 100, -100]
    assert (got.key, got.num_tokens) == ("r7", 9)


def test_with_train_markers_the_markers_of_trained_images_are_labels() -> None:
    got = example((Grid(1, 1), True), (Grid(1, 1), False), train_markers=True)
    assert got.labels.tolist() == [256, -100, 257, -100, -100, -100]


def test_a_slice_keeps_its_position_ids_and_the_patches_of_its_images() -> None:
    original = example(("abc", True), (PHOTO, True), ("de", False), (PHOTO[:8], True), ("f", True))
    first, second = original.slice(2, 13), original.slice(12, original.num_tokens)
    for part, start in ((first, 2), (second, 12)):
        stop = start + part.num_tokens
        dense = original.sequence.positions.dense()[:, start:stop]
        assert (part.sequence.positions.dense() == dense).all()
        assert (part.labels == original.labels[start:stop]).all()
        assert (part.sequence.input_ids == original.sequence.input_ids[start:stop]).all()
        assert part.sequence.segments.num_tokens == part.num_tokens
        assert part.sequence.part_offsets[[0, -1]].tolist() == [0, part.num_tokens]
    assert first.sequence.image_spans.tolist() == [[2, 8]]
    assert second.sequence.grid_thw.tolist() == [[1, 1, 3]]
    assert first.sequence.patches is not None
    assert second.sequence.patches is not None
    both = np.concatenate([first.sequence.patches, second.sequence.patches])
    assert (both == original.sequence.patches).all()
    assert first.sequence.image_hashes + second.sequence.image_hashes == original.sequence.image_hashes
    assert original.slice(0, 2).sequence.patches is None


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        (2, 2, "stop: got 2, want >= 3"),
        (0, 9, "stop: got 9, want <= 8"),
        (3, 8, "start: got 3 inside image 0, want it between parts"),
        (0, 6, "stop: got 6 inside image 0, want it between parts"),
    ],
)
def test_empty_slices_and_slices_through_an_image_are_refused(start: int, stop: int, message: str) -> None:
    whole = example(("ab", True), (Grid(1, 3), True), ("c", True))
    with pytest.raises(InvalidInputError) as refused:
        whole.slice(start, stop)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "r7: got no parts, want at least one"),
        ([("a", True), (b"no photo", True)], "r7 (shard.jsonl[3]): parts[1]: image: got a file"),
        ([("", True)], "r7 (shard.jsonl[3]): parts: got no tokens, want at least one"),
    ],
)
def test_errors_name_the_record_and_the_part(pieces: Any, message: str) -> None:
    with pytest.raises(RecordError) as refused:
        example(*pieces)
    assert str(refused.value).startswith(message)


def test_preprocess_can_be_pickled_and_checks_its_arguments() -> None:
    again = pickle.loads(pickle.dumps(Preprocess(Pieces(), BUILDER)))
    assert again({"pieces": [("a", True)]}, HERE).labels.tolist() == [97]
    with pytest.raises(InvalidInputError, match="format: got int, want a callable that takes a record and a location"):
        Preprocess(3, BUILDER)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="builder: got int, want an object with a build method"):
        Preprocess(Pieces(), 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"^r7: pieces\[1\]\.train: got 1, want True or False$"):
        example(("a", False), ("b", 1))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"r7: labels: got shape \(1,\), want \(2,\), the shape of input_ids"):
        Example("r7", BUILDER.build(["ab"]), np.array([IGNORE_INDEX]))


BROKEN = b"no picture"


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


@pytest.mark.parametrize(("policy", "on_error"), [("raise", "raise"), ("skip-document", "skip")])
def test_an_image_error_carries_the_image_policy(policy: OnImageError, on_error: str) -> None:
    with pytest.raises(ImageError, match=r"^r7 \(shard\.jsonl\[3\]\): parts\[1\]: image: got ") as refused:
        example(("a", True), (BROKEN, True), on_image_error=policy)
    assert refused.value.on_error == on_error
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.on_error, str(again)) == (on_error, str(refused.value))


@pytest.mark.parametrize("policy", ["drop", "skip-document", "raise"])
def test_other_errors_in_a_record_are_not_image_errors(policy: OnImageError) -> None:
    with pytest.raises(RecordError, match=r"parts\[1\]: got the patch marker's id 258") as refused:
        example((PHOTO, True), ([258], True), on_image_error=policy)
    assert not isinstance(refused.value, ImageError)


def test_a_document_with_only_broken_images_is_skipped() -> None:
    with pytest.raises(ImageError) as refused:
        example((BROKEN, True), (BROKEN, True), on_image_error="drop")
    assert refused.value.on_error == "skip"


def test_invalid_image_policies_are_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^on_image_error: got 'skip', want one of 'drop', 'skip-document', 'ra"
    ):
        example(("a", True), on_image_error="skip")
    with pytest.raises(
        InvalidInputError, match=r"^on_image_error: got 'drop' with a builder that reads no images, want"
    ):
        Preprocess(Pieces(), SequenceBuilder(), on_image_error="drop")


@pytest.mark.parametrize("policy", [None, "drop"])
def test_a_part_unsupported_by_the_builder_is_not_a_record_error(policy: OnImageError | None) -> None:
    parts: list[tuple[object, bool]] = [(Audio(1), True)] if policy is None else [(BROKEN, True), (Audio(1), True)]
    with pytest.raises(
        UnsupportedError, match=r"^r7 \(shard\.jsonl\[3\]\): parts\[0\]: got Audio, want a builder with"
    ):
        example(*parts, on_image_error=policy)


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_an_unavailable_server_is_neither_a_record_error_nor_an_image_error(policy: OnImageError) -> None:
    class Unavailable:
        def build(self, parts: object) -> Any:
            if len(parts) > 1 and policy == "drop":  # type: ignore[arg-type]
                raise InvalidInputError("parts[0]: image: broken")
            raise ServiceUnavailableError("away")

    with pytest.raises(ServiceUnavailableError, match="away"):
        Preprocess(Pieces(), Unavailable(), on_image_error=policy)({"pieces": [(PHOTO, True), ("a", True)]}, HERE)
