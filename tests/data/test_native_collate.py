"""Collation in C matches the reference, and never reads or writes outside its arrays."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from omni import BUILDER, CLIP
from results import assert_equal
from test_data_collate import FIRST, SECOND, with_photos
from test_data_packing import example

from mmpos import Grid, InvalidInputError, Markers, SequenceBuilder
from mmpos.data.collate import PackedCollator, PaddedCollator
from mmpos.data.examples import Example
from mmpos.segments import Audio
from mmpos.support import native

pytestmark = pytest.mark.skipif(native.core is None, reason="the extension was not built")


class Watched:
    """Wrapper around the extension that counts the calls which the extension answered."""

    core, answered = native.core, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def collate(self, *arguments: Any) -> Any:
        fields = self.core.collate(*arguments)
        self.answered += fields is not None
        return fields


def pools() -> list[list[Example]]:
    """Return pools of examples with the same number of axes, covering all kinds of segments and arrays."""
    rows = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256, 257, 258)).build([Grid(2, 2), "a"])
    bare = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256)).build([Grid(1, 2), Grid(1, 1)])
    video = [CLIP, Grid(2, 2, frames=2, seconds_per_frame=1)]
    audio = [BUILDER.build(parts) for parts in ([Audio(2)], ["ab", Audio(3), CLIP, "c"], video)]
    halves = SequenceBuilder(scheme="rope-tie-fractional").build(["abc", Grid(2, 3), "d"])
    long = example("long", 5000, (20, 30), 4000)
    odd = dataclasses.replace(FIRST.sequence, input_ids=np.repeat(FIRST.sequence.input_ids, 2)[::2])
    spoken = SequenceBuilder(scheme="flatten", markers=Markers(None, None, 256, audio=259)).build([Audio(2)])
    return [
        [FIRST, SECOND, FIRST.slice(6, 7), *with_photos(), long, Example("o", odd, FIRST.labels[::-1])],
        [FIRST, SECOND, Example("h", halves, halves.input_ids), Example("i", odd, FIRST.labels.astype(np.int32))],
        [Example(f"{i}", sequence, sequence.input_ids) for i, sequence in enumerate((rows, bare, spoken))],
        [Example(f"{i}", sequence, sequence.input_ids) for i, sequence in enumerate(audio)],
        [FIRST, *with_photos("mrope")],
    ]


def test_the_extension_matches_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, watched, all_pools = np.random.default_rng(0), Watched(), pools()
    for _ in range(400):
        pool = all_pools[rng.integers(len(all_pools))]
        examples = [pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 7))]
        multiple_of, pad_token_id = (int(rng.choice(numbers)) for numbers in ([1, 1, 3, 8], [0, 7]))
        length = int(rng.choice([0, 8, 24, 96])) * multiple_of or None
        side: Any = ["left", "right"][rng.integers(2)]
        for collator in (
            PackedCollator(multiple_of, length, pad_token_id),
            PaddedCollator(side, multiple_of, length, pad_token_id),
        ):
            outcomes: list[Any] = []
            for core in (watched, None):
                with monkeypatch.context() as patch:
                    patch.setattr(native, "core", core)
                    try:
                        outcomes.append(collator(examples))
                    except InvalidInputError as error:
                        outcomes.append(error)
            assert_equal(*outcomes)
    assert watched.answered > 400


@pytest.mark.parametrize("begin", [-1, 0, 1])
def test_an_image_that_begins_outside_its_document_is_declined(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, sequence = Watched(), copy.copy(FIRST.sequence)
    spans = sequence.image_spans.copy()
    spans[-1] = sequence.input_ids.size + begin, sequence.input_ids.size + 9
    object.__setattr__(sequence, "image_spans", spans)
    monkeypatch.setattr(native, "core", watched)
    with suppress(IndexError):  # from numpy, if the extension declines the example
        PackedCollator()([Example("k", sequence, FIRST.labels)])
    assert watched.answered == (begin < 0)


def test_each_scheme_is_named_once_in_order_of_appearance() -> None:
    one, _, other, _ = pools()[1]
    names = [PackedCollator()(examples).positions.scheme for examples in ([one, other, one], [other, one, one])]
    assert names == ["rope-tie + rope-tie-fractional", "rope-tie-fractional + rope-tie"]
