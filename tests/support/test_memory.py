"""Peak memory of the pipeline, including the result, in bytes per token and per pixel after resizing.

Memory used by numpy arrays and Python objects counts; memory used by torch and decoders does not.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from mmpos import Grid, SegmentTable, SequenceBuilder, Text, place
from mmpos.data import Example, PackedCollator, PaddedCollator
from mmpos.images import ImageProcessor

TOKENS = 100_000
PIXELS = np.zeros((448, 448, 3), np.uint8)
FIXED = 64 * 1024  # bytes independent of the input


def peak(call: Callable[[], object]) -> int:
    """Return the peak memory used by the second of two calls."""
    gc.disable()  # a collection would drop the small objects that Python keeps from the first call for the second
    try:
        call()
        tracemalloc.start()
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("parts", [["a" * TOKENS], [[1] * TOKENS], [np.ones(TOKENS, np.int64)]])
def test_text_requires_17_bytes_per_token(way: str, parts: Any) -> None:
    # The token ids exist twice, in the part's list or array and in the sequence; their types exist once.
    assert peak(lambda: SequenceBuilder().build(parts)) <= 17 * TOKENS + FIXED


@pytest.mark.parametrize(("scheme", "per_token"), [("rope-tie", 8), ("mrope", 12), ("rope-tie-fractional", 16)])
def test_dense_ids_require_only_their_own_memory(way: str, scheme: str, per_token: int) -> None:
    segments = SegmentTable.from_documents([[Text(TOKENS // 2), Grid(TOKENS // 500, 250)]])
    positions = place(segments, scheme)
    assert positions.dense().nbytes == per_token * TOKENS
    # numpy expands block by block.
    assert peak(positions.dense) <= per_token * TOKENS + {"C": FIXED, "numpy": 8 * FIXED}[way]


def test_a_table_requires_few_bytes_per_segment_and_none_per_token(way: str) -> None:
    one, long = ([[Text(length), Grid(length, length)]] for length in (1, 1000))
    many: list[list[Any]] = [[Text(10), Grid(3, 3)]] * 1000
    peaks = [peak(partial(lambda d: place(SegmentTable.from_documents(d)), documents)) for documents in (one, long)]
    assert abs(peaks[1] - peaks[0]) < 1024
    per_segment = {"C": 300, "numpy": 500}[way]
    assert peak(lambda: place(SegmentTable.from_documents(many))) <= per_segment * 2000 + FIXED


@pytest.mark.parametrize(
    ("collate", "per_token"), [(PackedCollator(), 23), (PackedCollator(multiple_of=7), 23), (PaddedCollator(), 31)]
)
def test_collation_requires_memory_for_the_batch_and_one_document(collate: Any, per_token: int) -> None:
    sequences = SequenceBuilder().build_batch([[np.arange(3000) % 200, Grid(40, 25)] for _ in range(25)])
    examples = [Example("", sequence, sequence.input_ids) for sequence in sequences]
    tokens = sum(example.num_tokens for example in examples)
    assert peak(lambda: collate(examples)) <= per_token * tokens + 12 * examples[0].num_tokens + FIXED


@pytest.mark.parametrize(
    ("dtype", "frames", "per_pixel"), [("uint8", None, 3), ("float32", None, 12), ("uint8", 1, 12), ("uint8", 2, 24)]
)
def test_patches_require_only_their_own_memory(dtype: str, frames: int | None, per_pixel: int) -> None:
    processor = ImageProcessor("pillow", order="merged", dtype=dtype)
    # numpy converts byte patches to planes in two steps.
    temporary = (27 if frames else 0) * PIXELS.size // 3
    processed = processor.process(PIXELS, temporal_patch_size=frames)
    assert processed.patches is not None
    assert processed.patches.nbytes == per_pixel * PIXELS.size // 3
    most = processed.patches.nbytes + temporary + FIXED
    assert peak(lambda: processor.process(PIXELS, temporal_patch_size=frames)) <= most


def test_a_single_image_is_not_copied_into_its_sequence_and_several_are_copied_once(way: str) -> None:
    builder = SequenceBuilder(images=ImageProcessor("pillow"))
    tokens = 2000  # bytes for everything except pixels
    one, two, three = (peak(partial(builder.build, [PIXELS] * n)) for n in (1, 2, 3))
    assert one <= PIXELS.size + 32 * tokens + FIXED
    assert two <= 4 * PIXELS.size + 64 * tokens + FIXED
    assert three - two <= 2 * PIXELS.size + 64 * tokens
