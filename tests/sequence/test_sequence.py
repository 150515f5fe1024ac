"""Sequences: parts become input_ids with markers, segments, positions, patches and spans."""

import dataclasses
import io
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import assert_refused
from results import assert_equal
from test_tokenizers import Plain, trained_bpe

from mmpos import (
    ByteTokenizer,
    Grid,
    ImageProcessor,
    ImageSize,
    InvalidInputError,
    LimitExceededError,
    Markers,
    SequenceBuilder,
    UnsupportedError,
    Video,
)

PROCESSOR = ImageProcessor(backend="pillow", patch_size=4, spatial_merge_size=2, min_pixels=64, max_pixels=4096)


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_text_token_ids_and_a_grid_become_one_sequence() -> None:
    sequence = SequenceBuilder().build(["ab", Grid(1, 2), "c", [7], ""])
    assert sequence.input_ids.tolist() == [97, 98, 256, 258, 258, 257, 99, 7]
    assert sequence.token_type_ids.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert sequence.part_offsets.tolist() == [0, 2, 6, 7, 8, 8]
    assert sequence.segments.lengths.tolist() == [3, 2, 3]  # adjacent texts form one segment
    assert sequence.grid_thw.tolist() == [[1, 1, 2]]
    assert sequence.image_spans.tolist() == [[3, 5]]
    assert sequence.image_hashes == (None,)
    assert sequence.patches is None
    assert sequence.positions.dense().tolist() == [[0, 1, 2, 5, 5, 8, 9, 10], [0, 1, 2, 4, 6, 8, 9, 10]]
    assert sequence.positions.next_positions.tolist() == [11]
    assert repr(sequence) == "InterleavedSequence(8 tokens, 1 image, patches=None)"


def test_requests_beyond_a_limit_are_refused_without_allocating_memory() -> None:
    builder = SequenceBuilder(scheme="flatten", start=2**31 - 9)
    tracemalloc.start()
    with pytest.raises(LimitExceededError, match="want ids within int32"):
        builder.build([Grid(2**10, 2**12)])
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_images_of_every_type_have_the_patches_and_hashes_of_the_processor(tmp_path: Path) -> None:
    first, second, encoded = pixels(24, 40), pixels(8, 16, 2), io.BytesIO()
    Image.fromarray(first).save(encoded, "PNG")
    data, path = encoded.getvalue(), tmp_path / "photo.png"
    path.write_bytes(data)
    builder, tensor = SequenceBuilder(images=PROCESSOR), torch.from_numpy(first).permute(2, 0, 1)
    alone = [PROCESSOR.process(image) for image in (first, second)]
    for image in (first, Image.fromarray(first), tensor, data, memoryview(data), path):
        sequence = builder.build(["x", image, second])
        assert sequence.grid_thw.tolist() == [[1, 3, 5], [1, 1, 2]]
        assert sequence.image_spans.tolist() == [[2, 17], [19, 21]]
        np.testing.assert_array_equal(sequence.patches, np.concatenate([one.patches for one in alone]))
        assert sequence.image_hashes == (PROCESSOR.process(image).content_hash, alone[1].content_hash)
    sized = builder.build(["x", ImageSize(24, 40), ImageSize(8, 16)])
    assert (sized.input_ids == sequence.input_ids).all()
    assert (sized.patches, sized.image_hashes) == (None, (None, None))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
@pytest.mark.usefixtures("way")
def test_token_ids_are_used_unchanged(kind: Any) -> None:
    assert SequenceBuilder().build([kind([5, 0, 2**40]), [], [9], "a"]).input_ids.tolist() == [5, 0, 2**40, 9, 97]


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        *(("[IMG]", text) for text in ("[IMG]", "a [/IMG] b", "[PATCH][PATCH]", "[[IMG]]", "[IMG[IMG]]")),
        ("||", "a|||b"),
        ("aba", "xababay"),
    ],
)
def test_a_marker_spelled_out_in_user_text_remains_text(begin: str, text: str) -> None:
    trained = trained_bpe()
    trained.add_special_tokens([begin])
    for tokenizer in (ByteTokenizer((begin, "[/IMG]", "[PATCH]")), trained):
        builder = SequenceBuilder(tokenizer, markers=Markers(begin=begin))
        sequence = builder.build([text])
        assert not set(sequence.input_ids.tolist()) & set(builder.marker_ids)
        assert builder.tokenizer.decode(sequence.input_ids.tolist()) == text


def test_text_that_encodes_to_a_marker_is_refused() -> None:
    builder = SequenceBuilder(Plain(), markers=Markers(begin="[X]", end=ord("e"), patch=ord("p")))
    assert builder.build(["ab"]).input_ids.tolist() == [97, 98]
    want = "parts[1]: got text that encodes to marker id 101, want plain text"
    assert_refused(want, lambda: builder.build(["ab", "e"]))


def test_a_text_that_spells_too_many_markers_is_refused_early() -> None:
    builder = SequenceBuilder(trained_bpe())
    with pytest.raises(LimitExceededError, match=r"parts\[0\]: got text that spells markers more than 10000 times"):
        builder.build(["[IMG]" * 100_000])
    assert SequenceBuilder().build(["[IMG]" * 100_000]).input_ids.size == 500_000


class OwnSpecialTokens(Plain):
    """A tokenizer that encodes text as given or by its characters, and can look up the ids of special tokens."""

    ids: Any = None

    def encode(self, text: str) -> Any:
        return self.ids or [ord(c) for c in text]

    def token_to_id(self, token: str) -> int | None:
        return {"[IMG]": 1, "[/IMG]": 2, "[PATCH]": 3}.get(token)


def test_a_tokenizer_provides_the_ids_of_its_special_tokens() -> None:
    builder = SequenceBuilder(OwnSpecialTokens())
    assert builder.build(["a", Grid(1, 1)]).input_ids.tolist() == [97, 1, 3, 2]
    assert dataclasses.replace(builder, start=5).build(["a"]).positions.dense().tolist() == [[5], [5]]
    for ids, message in (([1.5], "dtype float64"), (["h"], "dtype"), ([-1], "got -1")):
        builder.tokenizer.ids = ids
        with pytest.raises(InvalidInputError, match=rf"parts\[0\]: tokenizer.encode.*{message}"):
            builder.build(["a"])


@pytest.mark.parametrize(
    ("markers", "message"),
    [
        (Markers(begin="[X]"), r"markers.begin: got '\[X\]', want a token with a single id in the tokenizer"),
        (Markers(patch="[IMG]"), r"markers: got ids 256, 257 and 256, want 3 different ids"),
        (Markers(end=-1), r"markers.end: got -1, want >= 0"),
        (Markers(patch=None), r"markers\.patch: got None, want a token with a single id in the tokenizer"),  # type: ignore[arg-type]
        (Markers(begin=256, end=None, patch=256), r"markers: got ids 256 and 256, want 2 different ids"),
        (Markers(last_row=258), r"markers\.last_row requires markers\.row"),
        (Markers(audio_begin=9), r"markers\.audio_begin requires markers\.audio"),
        (Markers(audio_end=9), r"markers\.audio_end requires markers\.audio"),
    ],
)
def test_markers_that_do_not_have_a_single_id_are_refused(markers: Markers, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        SequenceBuilder(markers=markers)


def photographs(count: int) -> list[Any]:
    """Return files, arrays and Pillow images of several sizes in turn."""
    images = []
    for i in range(count):
        image, file = Image.fromarray(pixels(16 + 8 * (i % 3), 24, seed=i)), io.BytesIO()
        image.save(file, "PNG")
        images.append([file.getvalue(), np.asarray(image), image][i % 3])
    return images


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
def test_a_batch_does_not_depend_on_the_number_of_threads(threads: int | None) -> None:
    images = photographs(8)
    documents = [["a", images[i], [5], images[-1 - i], Grid(1, 2)][: 4 - i % 2] for i in range(8)]
    documents.append([Video(images[:3], times=[0, 1, 1]), images[1]])
    builder = SequenceBuilder(images=PROCESSOR)
    assert_equal(builder.build_batch(documents, threads=threads), [builder.build(parts) for parts in documents])


def test_only_files_and_arrays_are_processed_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[bool]()
    process = ImageProcessor.process

    def recording(self: ImageProcessor, image: Any) -> Any:
        calls.append(threading.current_thread() is threading.main_thread())
        return process(self, image)

    monkeypatch.setattr(ImageProcessor, "process", recording)
    builder = SequenceBuilder(images=PROCESSOR)
    builder.build_batch([photographs(6), ["a", ImageSize(16, 16)]], threads=2)
    assert Counter(calls) == {False: 4, True: 3}  # the main thread processes Pillow images and sizes
    builder.build_batch([photographs(6)], threads=1)
    assert Counter(calls) == {False: 4, True: 9}


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_broken_document_is_reported_even_if_later_ones_fail_earlier(threads: int) -> None:
    good = photographs(1)[0]
    builder = SequenceBuilder(images=PROCESSOR)
    for documents, message in (
        ([[good, good], ["a", good, b"broken"], [b"worse"]], r"documents\[1\]\.parts\[2\]: image: got a file"),
        ([[good, good, "\ud800"], [b"worse"]], r"documents\[0\]\.parts\[2\]: got text with a lone surrogate"),
        ([[good, good], "text", [b"worse"]], r"documents\[1\]\.parts: got str, want a list"),
        ([[good, good], [], [b"worse"]], r"documents\[1\]\.parts: got no tokens"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            builder.build_batch(documents, threads=threads)
    small = SequenceBuilder(images=ImageProcessor(backend="pillow", max_source_pixels=100))
    large: list[Any] = [["a"], ["b", "c", pixels(30, 30)]]
    beyond = "documents[1].parts[2]: image: got 30 x 30 = 900 pixels, want <= 100"
    assert_refused(beyond, lambda: small.build_batch(large, threads=threads), LimitExceededError)
    assert_refused("threads: got 0, want >= 1", lambda: builder.build_batch([], threads=0))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts: got no tokens, want at least one"),
        (["", []], "parts: got no tokens, want at least one"),
        ("text", "parts: got str, want a list of parts"),
        (None, "parts: got NoneType, want a list of parts"),
        (pixels(16, 16), "parts: got ndarray, want a list of parts"),
        (["a", "\ud800"], r"parts\[1\]: got text with a lone surrogate"),
        ([[7, -1]], r"parts\[0\]\[1\]: got -1, want >= 0"),
        (["a", [1.5]], r"parts\[1\]: got dtype float64, want integers"),
        (["a", [1, 1.5]], r"parts\[1\]: got dtype float64, want integers"),
        (["a", [1, 2**63]], r"parts\[1\]: got dtype float64, want integers"),
        ([[7, "a"]], r"parts\[0\]: got .*, want integers"),
        (["a", [True, False]], r"parts\[1\]: got dtype bool, want integers"),
        (["a", [1, [2]]], r"parts\[1\]: got "),
        (["a", [258]], r"parts\[1\]: got the patch marker's id 258, want images as parts"),
        (["a", b"not a picture"], r"parts\[1\]: image: "),
        (["a", 3], r"parts\[1\]: image: got int"),
        (
            [pixels(16, 16), ImageSize(16, 16)],
            "parts: got images with and without pixels, want all with pixels or all without",
        ),
    ],
)
@pytest.mark.usefixtures("way")
def test_invalid_parts_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SequenceBuilder(images=PROCESSOR).build(parts)
    with pytest.raises(UnsupportedError, match=r"parts\[0\]: got bytes, want text or token ids, or a builder with"):
        SequenceBuilder().build([b""])
