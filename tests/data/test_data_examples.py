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


BROKEN = b"no picture"
WHOLE = example(("ab", True), (Grid(1, 3), True), ("c", True))
WRONG: Any = 3
AT = "r7 (shard.jsonl[3]): "


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: WHOLE.slice(2, 2), InvalidInputError, "stop: got 2, want >= 3"),
        (lambda: WHOLE.slice(0, 9), InvalidInputError, "stop: got 9, want <= 8"),
        (lambda: WHOLE.slice(3, 8), InvalidInputError, "start: got 3 inside image 0, want it between parts"),
        (lambda: WHOLE.slice(0, 6), InvalidInputError, "stop: got 6 inside image 0, want it between parts"),
        (lambda: example(), RecordError, "r7: got no parts, want at least one"),
        (lambda: example(("a", True), (BROKEN, True)), RecordError, f"{AT}parts[1]: image: got a file"),
        (lambda: example(("", True)), RecordError, f"{AT}parts: got no tokens, want at least one"),
        (lambda: example(("a", False), ("b", WRONG)), InvalidInputError, "r7: pieces[1].train: got 3, want True or F"),
        (lambda: Preprocess(WRONG, BUILDER), InvalidInputError,
         "format: got int, want a callable that takes a record and a location"),
        (lambda: Preprocess(Pieces(), WRONG), InvalidInputError,
         "builder: got int, want an object with a build method"),
        (lambda: Example("r7", BUILDER.build(["ab"]), np.array([-100])), InvalidInputError,
         "r7: labels: got shape (1,), want (2,), the shape of input_ids"),
        (lambda: example(("a", True), on_image_error="skip"), InvalidInputError,
         "on_image_error: got 'skip', want one of 'drop', 'skip-document', 'raise', None"),
        (lambda: Preprocess(Pieces(), SequenceBuilder(), on_image_error="drop"), InvalidInputError,
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
        Preprocess(Pieces(), Unavailable(), on_image_error=policy)({"pieces": [(PHOTO, True), ("a", True)]}, HERE)
