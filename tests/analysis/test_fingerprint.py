"""Fingerprints: their canonical form, their independence from storage, and the diagnosis of sides that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import groupby, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmpos import Grid, InvalidInputError, PositionTable, Scheme, SegmentTable, Text, fingerprint, place, same_positions
from mmpos.positions.table import Side
from mmpos.schemes import RopeTie, RopeTieFractional, RopeTieV2

PARTS = st.one_of(
    st.builds(Text, st.integers(1, 6)), st.builds(Grid, st.integers(1, 4), st.integers(1, 4), frames=st.integers(1, 3))
)
DOCUMENTS = st.lists(st.lists(PARTS, min_size=1, max_size=4), min_size=1, max_size=3)
SCHEMES = st.sampled_from([RopeTie(axes=3), RopeTieV2(axes=3), RopeTieFractional(axes=3), "mrope", "v2pe", "flatten"])

Rows = Sequence[Sequence[int | float | Fraction]]


def canonical(document: Rows) -> str:
    """Compute the fingerprint of exact (axes, tokens) ids one token at a time."""
    tokens = [[Fraction(number) for number in ids] for ids in zip(*document, strict=True)]
    steps = tokens[:1] + [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(tokens)]
    steps = [[(number + 2**31) % 2**32 - 2**31 for number in step] for step in steps]
    runs = [[Fraction(1), *step] for step in steps[:1]]
    runs += [[Fraction(len([*run])), *step] for step, run in groupby(steps[1:])]
    fractional = any(number.denominator > 1 for run in runs for number in run[1:])
    columns = [[math.floor(number) for number in run] for run in runs]
    if fractional:
        for column, run in zip(columns, runs, strict=True):
            column += [getattr(number % 1, part) for part in ("numerator", "denominator") for number in run[1:]]
    data = np.array(columns, "<i8" if fractional else "<i4").T.tobytes()
    hashed = blake2b(bytes([len(document), fractional]) + data, digest_size=16, person=b"mmpos2")
    return f"mmpos2:{hashed.hexdigest()}"


def placed(documents: list[list[Any]], scheme: str | Scheme = "rope-tie") -> PositionTable:
    return place(SegmentTable.from_documents(documents), scheme, strict=False)


def exact(positions: PositionTable) -> list[Rows]:
    """Return the ids of every document as fractions."""
    numerators, over = positions.rationals()
    rows = [[Fraction(n, d) for n, d in zip(row, over.tolist(), strict=True)] for row in numerators.tolist()]
    return [[row[a:b] for row in rows] for a, b in pairwise(positions.cu_seqlens.tolist())]


@settings(max_examples=150)
@given(DOCUMENTS, SCHEMES, st.data())
def test_equal_ids_have_one_fingerprint_however_they_are_stored(
    documents: list[list[Any]], scheme: str | Scheme, data: st.DataObject
) -> None:
    positions = placed(documents, scheme)
    want = [canonical(document) for document in exact(positions)]
    assert fingerprint(positions) == want
    ids, (numerators, over) = positions.dense(), positions.rationals()
    dtypes = [np.float64] if positions.fractional else [np.int32, np.int64, np.float32, np.float64]
    packed = {"cu_seqlens": positions.cu_seqlens}
    laid_out: Any = data.draw(
        st.sampled_from([np.ascontiguousarray, np.asfortranarray, lambda x: np.repeat(x, 2, 1)[:, ::2]])
    )
    for dtype in dtypes:
        assert fingerprint(laid_out(ids.astype(dtype)), **packed) == want
    assert fingerprint(numerators, denominators=over, **packed) == want
    assert fingerprint(numerators * 3, denominators=over * 3, **packed) == want
    side: Side = data.draw(st.sampled_from(["left", "right"]))
    padded, mask = positions.padded(side=side)
    assert fingerprint(padded, attention_mask=mask) == fingerprint(positions.pad(side=side)) == want
    # With other segments: split anywhere and joined again.
    cuts = sorted(data.draw(st.lists(st.integers(0, positions.num_tokens), max_size=5)))
    edges = [0, *cuts, positions.num_tokens]
    assert fingerprint(positions.take(edges[:-1], edges[1:])) == want
    # In another order.
    order = data.draw(st.permutations(range(len(documents))))
    reordered = positions.window(order, [0] * len(order), positions.lengths[order])
    assert fingerprint(reordered) == [want[d] for d in order]
    assert fingerprint(reordered.dense(), cu_seqlens=reordered.cu_seqlens) == [want[d] for d in order]


@settings(max_examples=60)
@given(DOCUMENTS, SCHEMES, st.data())
def test_fingerprints_differ_exactly_where_ids_differ(
    documents: list[list[Any]], scheme: str | Scheme, data: st.DataObject
) -> None:
    positions = placed(documents, scheme)
    numerators, denominators = positions.rationals()
    at = data.draw(st.integers(0, numerators.size - 1))
    more = data.draw(st.sampled_from([0, 1, -3, 2**20]))  # added to the numerator
    numerators.flat[at] += more
    ids = numerators / denominators if positions.fractional else numerators
    side = {"position_ids": ids, "cu_seqlens": positions.cu_seqlens}
    pairs = zip(fingerprint(**side), fingerprint(positions), strict=True)
    document = int(positions.cu_seqlens.searchsorted(at % positions.num_tokens, side="right")) - 1
    assert [d for d, (a, b) in enumerate(pairs) if a != b] == ([document] if more else [])
    diagnosis = same_positions(side, positions)
    assert diagnosis.equal == (not more)
    assert diagnosis.equal or diagnosis.axis == at // positions.num_tokens


def test_fingerprints_depend_on_axes_tokens_and_steps_that_wrap_around() -> None:
    low, high = -(2**31), 2**31 - 1
    documents: list[Rows] = [
        [[]],
        [[], []],
        [[0]],
        [[0, 0]],
        [[0], [0]],
        [[1, 2, 3]],  # the second token begins a run even if its step equals the first id
        [[low, high, low, high]],
        [[high, low, high, low]],
        [[0, low, 0, low, 0, low, Fraction(1, 2)]],
    ]
    prints = [fingerprint(np.array(document, np.float64)) for document in documents]
    assert prints == [[canonical(document)] for document in documents]
    assert len({mark for (mark,) in prints}) == len(documents)
    assert fingerprint([5, 6]) == fingerprint([[5, 6]])
    assert fingerprint(np.zeros((3, 0, 4), np.int64)) == []


def exact_in_floats(number: Fraction) -> bool:
    return number.denominator**2 * abs(number) < 2**52


INTEGERS = st.integers(-(2**31), 2**31 - 1).map(Fraction)
FRACTIONS = st.builds(Fraction, st.integers(-(10**9), 10**9), st.integers(1, 2000)).filter(exact_in_floats)
TOKENS = st.integers(1, 3).flatmap(
    lambda axes: st.lists(
        st.lists(st.tuples(*[st.one_of(INTEGERS, FRACTIONS)] * axes), max_size=5), min_size=1, max_size=3
    ).filter(any)
)
"""Documents as lists of tokens, which have an exact id on every axis."""


@settings(max_examples=150)
@given(TOKENS, st.randoms(use_true_random=False), st.booleans())
@example([[(Fraction(n, 3),) for n in range(-3, 9)]], Random(0), False)  # one denominator for all
@example([[(Fraction(9256492036, 7), Fraction(1, 8191), Fraction(1, 999))]], Random(0), False)  # rounds numerators
@example([[(Fraction(1, 3),), (Fraction(1, 3) + Fraction(1, 999_983),)]], Random(0), False)
@example([[(Fraction(1, 2),), (Fraction(1),)], [(Fraction(3),), (Fraction(4),)]], Random(0), False)  # equal numerators
def test_any_ids_are_read_as_exact_fractions_and_masked_ids_are_not_read(
    documents: list[list[tuple[Fraction, ...]]], random: Random, masked: bool
) -> None:
    axes = max(len(token) for tokens in documents for token in tokens)
    want = [canonical(list(zip(*tokens, strict=True)) or [[]] * axes) for tokens in documents]
    mask, floats, over, numerators = list[int](), list[Any](), list[int](), list[Any]()
    edges = [0]
    for tokens in documents:
        for token in tokens:
            while masked and random.random() < 0.5:
                mask.append(0)
                floats.append([random.choice([np.nan, np.inf, 1e-12, 7.0])] * axes)
                numerators.append([random.choice([7, 2**62])] * axes)
                over.append(random.choice([0, -1, 2**40]))
            mask.append(1)
            floats.append([float(number) for number in token])
            over.append(math.lcm(*(number.denominator for number in token)))
            numerators.append([int(number * over[-1]) for number in token])
        edges.append(len(mask))
    options: dict[str, Any] = {"cu_seqlens": edges} | ({"attention_mask": mask} if masked else {})
    assert fingerprint(np.array(floats).T, **options) == want
    if max(over) < 2**31 or masked:
        assert fingerprint(np.array(numerators).T, denominators=over, **options) == want


def test_ids_are_never_repaired_and_an_empty_row_of_a_batch_is_a_document() -> None:
    assert fingerprint(np.array([[1 / 3]], np.float32)) != fingerprint([[1 / 3]])  # rounded to float32
    assert fingerprint(np.array([[0.25]], np.float16)) == fingerprint([[0.25]])
    batch = [[9, 0, 1], [4, 5, 6], [7, 8, 9]]
    want = [canonical([[0, 1]]), canonical([[4]]), canonical([[]])]
    assert fingerprint(batch, attention_mask=[[0, 1, 1], [1, 0, 0], [0, 0, 0]]) == want
    large = np.array([[1, 2**63, 4]], np.uint64)
    assert fingerprint(large, attention_mask=[1, 0, 1], denominators=2) == [canonical([[Fraction(1, 2), 2]])]
    assert same_positions({"position_ids": [[0.5, np.nan, 2.0]], "attention_mask": [1, 0, 1]}, [[0.5, 2.0]]).equal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": [True]}, "position_ids: got bool of shape (1,), want integers or floats"),
        ({"position_ids": [[0.5, float("nan")]]}, "position_ids must be finite and within int32"),
        ({"position_ids": [[1, 1 / (2**31 - 1), 1.2345e-9]]},
         "position_ids: got np.float64(1.2345e-09), want fractions with denominators below"),
        ({"position_ids": np.zeros((17, 2), int)}, "position_ids: got 17 axes, want 1 to 16"),
        ({"position_ids": [[0, 1]], "attention_mask": [[1, 2]]}, "attention_mask must hold only 0 and 1"),
        ({"position_ids": [[0, 1]], "attention_mask": [[[1, 1]]]}, "attention_mask must hold only 0 and 1"),
        ({"position_ids": np.zeros((3, 2, 4), int), "attention_mask": np.ones((4, 2))},
         "attention_mask: got shape (4, 2), want (2, 4), the shape of position_ids"),
        ({"position_ids": [[0, 1]], "cu_seqlens": [0, 3]}, "cu_seqlens: got [0, 3], want ascending"),
        ({"position_ids": [[[0, 1], [0, 1]]], "cu_seqlens": [0, 2, 4]},
         "cu_seqlens requires packed position_ids, got a batch of 2"),
        ({"position_ids": [[0.5]], "denominators": 2}, "denominators requires integer position_ids, got float64"),
        ({"position_ids": [[1]], "denominators": 0}, "denominators[0]: got 0, want >= 1"),
        ({"position_ids": [[1] * 9], "denominators": 2**31}, "denominators[0]: got 2147483648, want <= 2147483647"),
        ({"position_ids": [2**31]}, "position_ids: got 2147483648 in column 0, want ids within int32"),
        ({"position_ids": [-(2**31) - 1]}, "position_ids: got -2147483649 in column 0, want ids within int32"),
        ({"position_ids": np.array([[0, 0], [0, 2**64 - 1]], np.uint64), "attention_mask": [0, 1]},
         "position_ids: got 9223372036854775807 in column 1, want ids within int32"),
        ({"position_ids": [2**33 + 1], "denominators": 4}, "position_ids: got 8589934593/4 in column 0, want ids"),
        ({"position_ids": placed([[Text(1)]]), "cu_seqlens": [0, 1]},
         "cu_seqlens cannot be combined with a PositionTable"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        fingerprint(**arguments)
    assert str(error.value).startswith(message)


def test_tensors_must_be_on_the_host_and_may_require_gradients() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0.0, 0.5, 2.0]], requires_grad=True)
    assert fingerprint(ids, attention_mask=torch.tensor([1, 1, 0])) == fingerprint([[0.0, 0.5]])
    assert same_positions(ids, [[0.0, 0.5, 2.0]]).equal
    numbers = {"position_ids": [[1]], "attention_mask": [1], "cu_seqlens": [0, 1], "denominators": [1]}
    for name in numbers:
        with pytest.raises(InvalidInputError) as error:
            fingerprint(**{**numbers, name: torch.ones(1, device="meta")})
        assert str(error.value) == f"{name}: got a tensor on meta, want a tensor on the CPU; call .cpu()"
    with pytest.raises(InvalidInputError) as error:
        fingerprint(torch.ones(1, 3, dtype=torch.bfloat16))
    assert str(error.value) == (
        "position_ids: got bfloat16, which rounds integers above 256, "
        "want int32, int64, float32 or float64 that was never cast to bfloat16"
    )


WANT = placed([[Text(3), Grid(2, 3), Text(2)], [Text(4)]], "mrope")
IDS = WANT.dense()
PACKED = {"position_ids": IDS, "cu_seqlens": [0, 11, 15]}


def difference(a: Any, b: Any = WANT) -> str:
    return str(same_positions(a, b))


def test_equal_positions_are_equal_however_they_are_stored() -> None:
    ids, mask = WANT.padded(side="left")
    equal = "All 15 tokens of 2 documents have the ids of mrope."
    assert difference(PACKED) == difference({"position_ids": ids, "attention_mask": mask}) == equal
    assert difference(WANT.pad(), WANT) == equal
    assert difference(WANT, PACKED) == "All 15 tokens of 2 documents have the ids of b."


def test_the_first_difference_is_reported_with_both_values_and_its_cause() -> None:
    rest = "got (4, 3, 3), want (3, 4, 3) in {}. 3 of 15 tokens differ, in 1 of 2 documents. Cause: axes are swapped"
    swapped = {**PACKED, "position_ids": IDS[[1, 0, 2]]}
    where = "documents[0], token 6, is frame 0, row 1, column 0 of a grid of width 3 (segment 1): "
    assert difference(swapped).startswith(where + rest.format("mrope"))
    assert difference(swapped, PACKED).startswith("documents[0], token 6, is one of 11 tokens: " + rest.format("b"))
    one = IDS.copy()
    one[2, 12] = 7
    diagnosis = same_positions({**PACKED, "position_ids": one}, PACKED)
    assert (diagnosis.document, diagnosis.token, diagnosis.axis) == (1, 1, 2)
    assert diagnosis.got == (1, 1, 7)
    assert diagnosis.want == (Fraction(1),) * 3


def test_a_cause_is_found_from_ids_alone() -> None:
    assert "documents start at 2, not at 0." in difference({**PACKED, "position_ids": IDS + 2}, PACKED)
    index = np.broadcast_to(np.r_[:11, :4], (3, 15))
    assert "ids are the token's index in its document" in difference({**PACKED, "position_ids": index}, PACKED)
    halves = placed([[Text(3), Grid(2, 3), Text(2)]], "rope-tie-v2")
    assert "fractions are truncated" in difference(np.trunc(halves.dense()), halves.dense())
    reordered = {"position_ids": np.roll(IDS, 4, axis=1), "cu_seqlens": [0, 4, 15]}
    assert "Cause: documents are in another order: documents[0] has the ids of documents[1]." in difference(reordered)


def test_documents_of_different_lengths_are_recognized() -> None:
    short = {"position_ids": IDS[:, :14], "cu_seqlens": [0, 11, 14]}
    assert difference(short) == (
        "documents[1], token 3, is token 3 of a run of text (segment 3): got no token, want (3, 3, 3) in mrope. "
        "1 of 15 tokens differ, in 1 of 2 documents. Cause: documents[1] has 3 tokens and should have 4. "
        "To do: pass the same tokens on both sides, with a mask of the padding."
    )
    assert difference(WANT, short).startswith(
        "documents[1], token 3, is one token too many: got (3, 3, 3), want no token in b. 1 of 15"
    )
    late = {"position_ids": IDS[:, 1:], "cu_seqlens": [0, 10, 14]}
    assert difference(late).startswith(
        "documents[0], token 0, is token 0 of a run of text (segment 0): got (1, 1, 1), want (0,"
    )


TEXT_ROW: dict[str, Any] = {**PACKED, "position_ids": np.concatenate([[np.r_[:11, :4]], IDS])}
HINT = r"; Transformers' text row is not an axis: pass position_ids\[1:\]$"
CLOSE = [{"position_ids": [[2**60 + extra]], "denominators": 2**30} for extra in (0, 1)]


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (TEXT_ROW, WANT, "a: got 4 axes, want 3, as in b" + HINT),
        (PACKED, TEXT_ROW, "a: got 3 axes, want 4, as in b" + HINT),
        (PACKED, placed([[Text(11)], [Text(4)]], "xd-rope"), "a: got 3 axes, want 4, as in b$"),
        (PACKED, {**PACKED, "position_ids": IDS[:1]}, "a: got 3 axes, want 1, as in b$"),
        ({**PACKED, "position_ids": IDS[:2]}, WANT, "a: got 2 axes, want 3, as in b$"),
        (IDS, WANT, "a: got 1 document, want 2, as in b$"),
        ({**PACKED, "input_ids": []}, WANT, "a: got the arguments position_ids, cu_seqlens, input_ids, want posit"),
        ({**PACKED, "cu_seqlens": [0, 9]}, WANT, r"a\.cu_seqlens: got \[0, 9\], want ascending integers from 0 to 15"),
        (*CLOSE, ".* differ from those of b, but not in float64"),
    ],
)
def test_sides_that_cannot_be_compared_are_refused(a: Any, b: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        same_positions(a, b)
