"""Packing: nothing is lost or duplicated, images are not cut, packs are well filled, and memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Grid, InvalidInputError
from mmpos.data import packing
from mmpos.data.examples import Example, RecordError
from mmpos.data.packing import Pack, PackCounts, Packer, best_fit_decreasing
from mmpos_bench.data import labelled, mix, packed_counts

Parts = list[int | tuple[int, int]]
"""A document: the lengths of its texts, and height and width of its images."""


def example(key: str, *parts: int | tuple[int, int]) -> Example:
    """Make an example whose text tokens all differ."""
    start, content = 1000, []
    for part in parts:
        content.append(Grid(*part) if isinstance(part, tuple) else list(range(start, start := start + part)))
    return labelled(key, content)


def examples_of(documents: Sequence[Parts]) -> list[Example]:
    return [example(f"r{i}", *parts) for i, parts in enumerate(documents)]


def packs_of(packer: Packer, examples: Sequence[Example]) -> list[Pack]:
    return [pack for one in examples for pack in packer.add(one)] + packer.flush()


def sizes_of(packs: Sequence[Pack]) -> list[list[tuple[str, int]]]:
    return [[(one.key, one.num_tokens) for one in pack.examples] for pack in packs]


def content(pieces: Sequence[Example]) -> list[Any]:
    """Return the content of a document, regardless of how the document is cut into pieces."""
    sequences = [piece.sequence for piece in pieces]
    return [
        np.concatenate([sequence.input_ids for sequence in sequences]).tolist(),
        np.concatenate([piece.labels for piece in pieces]).tolist(),
        np.concatenate([sequence.positions.dense() for sequence in sequences], axis=1).tolist(),
        np.concatenate([sequence.grid_thw for sequence in sequences]).tolist(),
    ]


def best_fit_by_loops(lengths: list[int], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [max_tokens - sum(lengths[j] for j in group) for group in groups]
        fitting = [(room, group) for group, room in enumerate(rooms) if room >= lengths[i]]
        if fitting:
            groups[min(fitting)[1]].append(i)
        else:
            groups.append([i])
    return groups


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 50))
def test_best_fit_decreasing_matches_plain_loops(lengths: list[int], max_tokens: int) -> None:
    assert best_fit_decreasing(lengths, max_tokens) == best_fit_by_loops(lengths, max_tokens)


def test_a_pack_starts_with_the_oldest_example_and_continues_with_the_longest_that_fit() -> None:
    packer = Packer(10, buffer=4)
    arrived = [example(key, n) for key, n in [("a", 3), ("b", 2), ("c", 5), ("d", 2), ("e", 9)]]
    assert sizes_of([pack for one in arrived for pack in packer.add(one)]) == [[("a", 3), ("c", 5), ("b", 2)]]
    assert [one.key for one in packer.pending] == ["d", "e"]
    assert sizes_of(packer.flush()) == [[("d", 2)], [("e", 9)]]
    assert packer.counts == PackCounts(packs=3, tokens=21, capacity=30)
    assert packer.counts.fill == 0.7
    assert PackCounts().fill == 0


def test_the_rest_of_a_split_text_keeps_its_position_ids_and_its_place_in_line() -> None:
    document = example("a", 6, (2, 4), 8)
    packer = Packer(10, buffer=1, split_text=True)
    packs = packs_of(packer, [example("x", 7), document, example("y", 3)])
    assert sizes_of(packs) == [[("x", 7), ("a", 3)], [("a", 3), ("y", 3)], [("a", 10)], [("a", 8)]]
    assert content([piece for pack in packs for piece in pack.examples if piece.key == "a"]) == content([document])
    assert packer.counts == PackCounts(packs=4, tokens=34, capacity=40, splits=3)


def test_no_cut_leaves_a_piece_shorter_than_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    before_an_image = [example("x", 5), example("a", 2, (2, 2), 1)]
    cases: list[tuple[int, list[Example], list[list[tuple[str, int]]]]] = [
        (3, [example("x", 7), example("a", 8)], [[("x", 7), ("a", 3)], [("a", 5)]]),
        (4, [example("x", 7), example("a", 8)], [[("x", 7)], [("a", 8)]]),
        (3, [example("x", 5), example("a", 6)], [[("x", 5), ("a", 3)], [("a", 3)]]),
        (3, before_an_image, [[("x", 5)], [("a", 9)]]),
        (2, before_an_image, [[("x", 5), ("a", 2)], [("a", 7)]]),
    ]
    for minimum, examples, want in cases:
        monkeypatch.setattr(packing, "MIN_PIECE", minimum)
        assert sizes_of(packs_of(Packer(10, split_text=True), examples)) == want


def test_documents_are_counted_with_padding_to_multiple_of() -> None:
    packs = packs_of(Packer(8, multiple_of=4), [example("a", 5), example("b", 1), example("c", 3)])
    assert sizes_of(packs) == [[("a", 5)], [("b", 1), ("c", 3)]]
    assert packs[1].fill == 0.5
    packs = packs_of(Packer(8, multiple_of=4, split_text=True), [example("a", 3), example("b", 7)])
    assert sizes_of(packs) == [[("a", 3), ("b", 4)], [("b", 3)]]


def test_the_buffer_is_bounded_in_examples_and_tokens() -> None:
    for packer, held in ((Packer(100, buffer=3), 3), (Packer(10), 16)):
        for i in range(held):
            assert packer.add(example(f"r{i}", 10)) == []
        assert len(packer.add(example("last", 10))) == 1
        assert sum(one.num_tokens for one in packer.pending) == 10 * (held + 1) - packer.counts.tokens


LONG = example("r", 4, (2, 3), 9)
HUGE = example("r", 4, (4, 4), 3)


@pytest.mark.parametrize(
    ("options", "one", "kept", "counts"),
    [
        ({"overlong": "drop"}, LONG, [], PackCounts(dropped=1, tokens_lost=21)),
        ({"overlong": "truncate"}, LONG, [16], PackCounts(truncated=1, tokens_lost=5)),
        ({"overlong": "truncate"}, HUGE, [4], PackCounts(truncated=1, tokens_lost=21)),
        ({"overlong": "truncate", "split_text": True}, HUGE, [4], PackCounts(truncated=1, tokens_lost=21)),
        ({"overlong": "truncate"}, example("r", (4, 4)), [], PackCounts(dropped=1, tokens_lost=18)),
        ({"overlong": "drop", "split_text": True}, LONG, [21], PackCounts()),
    ],
)
def test_overlong_examples_are_cut_or_dropped(options: Any, one: Example, kept: list[int], counts: PackCounts) -> None:
    packer = Packer(16, **options)
    assert packer.add(one) == []
    assert [held.num_tokens for held in packer.pending] == kept
    assert content(packer.pending[:1] or [one])[0] == content([one])[0][: sum(kept) or None]
    assert packer.counts == counts


POLICIES = "or overlong='truncate' or 'drop'"


@pytest.mark.parametrize(
    ("options", "one", "message"),
    [
        ({}, LONG, f"r: tokens: got 21, want at most 16, {POLICIES}"),
        ({"split_text": True}, HUGE, f"r: image 0: got 18 tokens with its markers, want at most 16, {POLICIES}"),
        ({"max_tokens": 0}, LONG, "max_tokens: got 0, want >= 1"),
        ({"max_tokens": 10, "multiple_of": 4}, LONG, "max_tokens: got 10, want a multiple of multiple_of=4"),
        ({"buffer": 0}, LONG, "buffer: got 0, want >= 1"),
        ({"split_text": 1}, LONG, "split_text: got 1, want True or False"),
        ({"overlong": "cut"}, LONG, "overlong: got 'cut', want one of 'raise', 'truncate', 'drop'"),
        ({}, "text", "example: got str, want an Example"),
    ],
)
def test_an_example_too_long_for_a_pack_and_invalid_arguments_are_refused(options: Any, one: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        Packer(**{"max_tokens": 16, **options}).add(one)
    assert str(refused.value) == message
    assert isinstance(refused.value, RecordError) == (POLICIES in message)
    with pytest.raises(InvalidInputError, match=r"^lengths\[1\]: got 9, want <= 8$"):
        best_fit_decreasing([1, 9], 8)
    assert best_fit_decreasing([1, 1], 1) == [[0], [1]]


sides = st.tuples(st.integers(1, 3), st.integers(1, 3))
documents = st.lists(st.lists(st.integers(1, 12) | sides, min_size=1, max_size=4), max_size=12)
packers = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([12, 24, 60]),
        "buffer": st.integers(1, 6),
        "split_text": st.booleans(),
        "multiple_of": st.sampled_from([1, 4]),
        "overlong": st.sampled_from(["truncate", "drop"]),
    }
)


@settings(max_examples=40)
@given(documents, packers)
def test_packs_contain_every_token_once_and_do_not_cut_images(documents: list[Parts], options: dict[str, Any]) -> None:
    examples, packer = examples_of(documents), Packer(**options)
    packs = packs_of(packer, examples)
    most, multiple = options["max_tokens"], options["multiple_of"]
    for pack in packs:
        assert 0 < sum(-(-one.num_tokens // multiple) * multiple for one in pack.examples) <= most
        assert pack.max_tokens == most
        for one in pack.examples:
            spans = one.sequence.image_spans
            assert (spans[:, 1] - spans[:, 0]).tolist() == one.sequence.grid_thw.prod(axis=1).tolist()
            assert (one.sequence.input_ids[spans[:, 0] - 1] == 256).all()
            assert (one.sequence.input_ids[spans[:, 1]] == 257).all()
    lost = 0
    for document in examples:
        pieces = [one for pack in packs for one in pack.examples if one.key == document.key]
        assert options["split_text"] or len(pieces) <= 1
        kept = sum(piece.num_tokens for piece in pieces)
        lost += document.num_tokens - kept
        assert not pieces or content(pieces) == content([document.slice(0, kept)])
        fits = document.num_tokens <= most or (options["split_text"] and most > 11)
        assert kept == document.num_tokens or not fits
    counts = packer.counts
    assert (counts.tokens_lost, counts.packs, counts.capacity) == (lost, len(packs), len(packs) * most)
    assert counts.tokens == sum(pack.num_tokens for pack in packs)
    assert packer.pending == ()


@pytest.mark.parametrize(("split_text", "fill"), [(False, 0.99), (True, 0.998)])
def test_packs_of_a_realistic_mix_are_nearly_full(split_text: bool, fill: float) -> None:
    """Pack the mix of mmpos_bench.data to 8,192 tokens: log-normal texts, 0 to 8 images of 64 to 1024 tokens."""
    counts, held = packed_counts(list(mix(1000)), 8192, split_text)
    assert counts.packs > 160
    assert counts.fill >= fill
    assert held <= 256
