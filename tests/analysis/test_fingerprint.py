"""Digests of positions: the sum that they are, what they do not depend on, and what two sides with others are told."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from hashlib import sha256
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Grid, InvalidInputError, PositionTable, Scheme, SegmentTable, Text, fingerprint, place, same_positions
from mmpos.analysis.fingerprint import merge
from mmpos.positions.table import LAYOUTS
from mmpos.schemes import RopeTie, RopeTieFractional, RopeTieV2
from mmpos.support import native

P = 2**61 - 1

PARTS = st.one_of(
    st.builds(Text, st.integers(1, 6)),
    st.builds(Grid, st.integers(1, 4), st.integers(1, 4), frames=st.integers(1, 3)),
)
DOCUMENTS = st.lists(st.lists(PARTS, min_size=1, max_size=4), min_size=1, max_size=3)
SCHEMES = st.sampled_from([RopeTie(axes=3), RopeTieV2(axes=3), RopeTieFractional(axes=3), "mrope", "v2pe", "flatten"])


def constant(name: str) -> int:
    return int.from_bytes(sha256(f"mmpos.fingerprint 1: {name}".encode()).digest()[:16], "little") % P


def digest(document: Sequence[Sequence[int | Fraction]]) -> bytes:
    """The sum of the module's formula, token by token, of one document's ids as (axes, tokens)."""
    halves = []
    for point in range(2):
        x, shift = constant(f"point {point}"), constant(f"shift at point {point}")
        total = 0
        for axis, ids in enumerate(document):
            for i, number in enumerate(ids):
                exact = Fraction(number)
                element = exact.numerator * pow(exact.denominator, -1, P)
                total += pow(x, i, P) * constant(f"axis {axis} at point {point}") * (element + shift)
        halves.append((total % P).to_bytes(8, "little"))
    return b"".join(halves)


@pytest.fixture(params=["C", "C for any CPU", "numpy"])
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to the sums."""
    core: Any = native.core
    if request.param == "C for any CPU" and core is not None:

        def sums(*arguments: Any) -> Any:
            return core.sums(*arguments[:-1], False)

        monkeypatch.setattr(native, "core", SimpleNamespace(**{**vars(core), "sums": sums}))
    elif request.param == "numpy":
        monkeypatch.setattr(native, "core", None)


def placed(documents: list[list[Any]], scheme: str | Scheme = "rope-tie") -> PositionTable:
    return place(SegmentTable.from_documents(documents), scheme, strict=False)


@pytest.mark.usefixtures("_core")
def test_a_digest_is_the_sum_of_its_formula() -> None:
    ids = [[0, 1, 2, 2, 2, 4], [0, 1, 2, 3, -7, 2**31 - 1]]
    assert fingerprint(ids) == [digest(ids)]
    assert fingerprint([5, 6]) == [digest([[5, 6]])]
    assert fingerprint(np.zeros((3, 0), np.int64)) == [bytes(16)]
    assert fingerprint([[4, 3]], denominators=[8, 9]) == [digest([[Fraction(1, 2), Fraction(1, 3)]])]
    assert fingerprint([[2**40]], denominators=2**20) == fingerprint([[2**20]])
    long = np.arange(2 * 700).reshape(2, 700) % 9 - 4
    assert fingerprint(long) == [digest(long.tolist())]


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64]
)
def test_the_dtype_does_not_count(dtype: Any) -> None:
    ids = np.array([[0, 1, 2], [0, 5, 100]])
    assert fingerprint(ids.astype(dtype)) == [digest(ids.tolist())]


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_ids_of_any_size_count_in_any_block(dtype: Any, side_by_side: bool) -> None:
    ids = np.arange(2 * 700).reshape(2, 700)
    ids[0, :256] = 2**25 - 2, *[2**25 - 1] * 255  # sums of as much as 64 bits hold; float32 rounds them up
    ids[1, 100:400] = np.resize([-1, 2**25, -(2**31), 2**31 - 128, 2**16, 0], 300)
    ids = ids.astype(dtype)
    laid = ids if side_by_side else np.repeat(ids, 2, axis=1)[:, ::2]
    want = [digest(ids.astype(np.int64).tolist())]
    assert fingerprint(laid) == fingerprint(laid.T.copy().T) == want
    if ids.dtype.kind == "f":
        ids[:, ::3] = ids[:, ::3] % 2**16 + 0.25  # with neighbours that are too large for quarters in C
        assert fingerprint(ids) == [digest([[Fraction(number) for number in row] for row in ids.tolist()])]
        assert fingerprint(ids % 2**16) == [digest([[Fraction(x) for x in row] for row in (ids % 2**16).tolist()])]


@pytest.mark.usefixtures("_core")
def test_fractions_may_have_any_denominators_in_any_block() -> None:
    over = np.repeat([1, 17, 357, 4, 1, 999_983], [40, 460, 90, 10, 80, 20])  # from the fifth on within a block
    rows = [[Fraction(i * sign, d) for i, d in enumerate(over.tolist())] for sign in (3, -100_000)]
    assert fingerprint([[float(number) for number in row] for row in rows]) == [digest(rows)]
    thirds = [[Fraction(i, 3) for i in range(700)]]
    floats = np.array([[float(number) for number in thirds[0]]])
    assert fingerprint(floats) == fingerprint(np.repeat(floats, 2, axis=1)[:, ::2]) == [digest(thirds)]
    if native.core is not None:
        run = np.array([[0], [700], [0], [0]])
        powers, factors, sums = np.ones((2, 256), np.int64), np.ones((2, 2), np.int64), np.zeros((1, 2), np.int64)
        assert native.core.sums(floats, False, run, None, powers, factors, sums, True)


@pytest.mark.usefixtures("_core")
def test_floats_stand_for_the_fractions_that_they_round() -> None:
    exact = [[Fraction(1, 3), Fraction(100_000 * 7 + 2, 7), Fraction(-5, 2)]]
    assert fingerprint([[float(number) for number in exact[0]]]) == [digest(exact)]
    assert fingerprint(np.array([[1 / 3]], np.float32)) != [digest([[Fraction(1, 3)]])]  # float32 cannot hold a third


@settings(max_examples=12)
@given(DOCUMENTS, SCHEMES, st.data())
def test_documents_alone_count(documents: list[list[Any]], scheme: str | Scheme, data: st.DataObject) -> None:
    positions = placed(documents, scheme)
    numerators, denominators = positions.rationals()
    edges = positions.cu_seqlens
    want = [
        digest(
            [[Fraction(int(n), int(d)) for n, d in zip(row[a:b], denominators[a:b], strict=True)] for row in numerators]
        )
        for a, b in pairwise(edges.tolist())
    ]
    cut = sorted({0, positions.num_tokens, *data.draw(st.lists(st.integers(0, positions.num_tokens), max_size=5))})
    length = -(-positions.max_seqlen // 4) * 4
    padded = positions.pad(length, side="left")
    ids, mask = positions.padded(length + 1)
    order = data.draw(st.permutations(range(len(documents))))
    for core in (native.core, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "core", core)
            assert fingerprint(positions) == want
            assert fingerprint(positions.take(cut[:-1], cut[1:])) == want
            assert fingerprint(padded) == want
            assert fingerprint(positions.dense(), cu_seqlens=edges) == want
            assert fingerprint(numerators, denominators=denominators, cu_seqlens=edges) == want
            assert fingerprint(ids, attention_mask=mask) == want
            assert fingerprint(ids[:, order], attention_mask=mask[order]) == [want[d] for d in order]
            for layout in LAYOUTS:
                places = [padded.shard_indices(rank, 2, layout) for rank in range(2)]
                whole = {"attention_mask": positions.padded(length, side="left")[1]}
                assert merge([fingerprint(padded.dense()[:, at], tokens=at, **whole) for at in places]) == want


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_numerators_of_any_integers_are_over_denominators(dtype: Any) -> None:
    ids = np.array([[4, 3, -5]], dtype)
    assert fingerprint(ids, denominators=[8, 9, 2]) == [digest([[Fraction(1, 2), Fraction(1, 3), Fraction(-5, 2)]])]


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "over",
    [
        np.arange(1, 901),  # another at every token
        np.resize([3, 3, 5], 900),
        np.repeat([1, 17, 33, 1, 2**31 - 1], [300, 250, 8, 7, 335]),  # 1, 17 and 33 share a place for their inverses
        np.repeat(np.arange(1, 31), np.arange(16, 46))[:900],
        np.full(900, 6),
    ],
)
def test_denominators_may_change_anywhere(dtype: Any, over: Any) -> None:
    ids = np.arange(2 * 900, dtype=dtype).reshape(2, 900) * 999_983 - 2**29
    mask = np.arange(900) % 400 > 2
    rows = [[Fraction(n, d) for n, d in zip(row, over[mask].tolist(), strict=True)] for row in ids[:, mask].tolist()]
    want = [digest([row[:500] for row in rows]), digest([row[500:] for row in rows])]
    edges = [0, int(np.flatnonzero(mask)[500]), 900]
    packed: Any = {"attention_mask": mask, "cu_seqlens": edges}
    assert fingerprint(ids, denominators=np.where(mask, over, 0), **packed) == want
    parts = [np.arange(900)[::2], np.arange(900)[1::2]]
    digests = [fingerprint(ids[:, at], tokens=at, denominators=over[at], **packed) for at in parts]
    assert merge(digests) == want
    if (over == over[0]).all():
        assert fingerprint(ids, denominators=over[0], **packed) == want


@pytest.mark.usefixtures("_core")
def test_what_is_under_the_mask_neither_counts_nor_is_refused() -> None:
    mask = [1, 0, 1, 0, 0]
    want = [digest([[Fraction(1, 2), 2]])]
    assert fingerprint([[0.5, np.nan, 2.0, np.inf, 1e-12]], attention_mask=mask) == want
    assert fingerprint(np.array([[1, 2**63, 4, 2**62, 9]], np.uint64), attention_mask=mask, denominators=2) == want
    assert fingerprint([[1, 7, 2, 7, 7]], attention_mask=mask, denominators=[2, 0, 1, -1, 2**40]) == want
    assert same_positions({"position_ids": [[0.5, np.nan, 2.0]], "attention_mask": mask[:3]}, [[0.5, 2.0]]).equal


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        (np.array([[0, 2**61]]), {}, "position_ids: got 2305843009213693952 in column 1, want ids within int32"),
        (np.array([[2**31]]), {}, "position_ids: got 2147483648 in column 0, want ids within int32"),
        (np.array([[-(2**31) - 1]]), {}, "position_ids: got -2147483649 in column 0, want ids within int32"),
        (np.array([[2**64 - 1]], np.uint64), {}, "position_ids: got 9223372036854775807 in column 0, want ids within"),
        (np.array([[2**33 + 1]]), {"denominators": 4}, "position_ids: got 8589934593/4 in column 0, want ids within"),
        (np.array([[2147483647.5]]), {}, "position_ids: got numbers that are not finite or beyond int32"),
    ],
)
def test_ids_beyond_int32_are_refused(ids: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        fingerprint(ids, **options)
    assert str(error.value).startswith(words)
    assert fingerprint([[2**31 - 1, -(2**31)]]) == [digest([[2**31 - 1, -(2**31)]])]


@pytest.mark.usefixtures("_core")
def test_a_part_costs_memory_of_the_part() -> None:
    last = 2**31 - 2
    x, y = (constant(f"point {point}") for point in range(2))
    alone = [digest([[7]])[half : half + 8] for half in (0, 8)]
    want = b"".join(
        (int.from_bytes(one, "little") * pow(point, last, P) % P).to_bytes(8, "little")
        for one, point in zip(alone, (x, y), strict=True)
    )
    assert fingerprint([7], tokens=[last], cu_seqlens=[0, last + 1]) == [want]
    with pytest.raises(InvalidInputError, match=r"^cu_seqlens\[1\]: got 1125899906842624, want <= 2147483647$"):
        fingerprint([7], tokens=[0], cu_seqlens=[0, 2**50])


def test_parts_of_a_masked_batch_may_be_padding_alone() -> None:
    ids, mask = np.array([[9, 5, 6, 9]]), [0, 1, 1, 0]
    whole = {"attention_mask": mask, "cu_seqlens": [0, 2, 4]}
    parts = [fingerprint(ids[:, at], tokens=at, **whole) for at in ([0, 3], [2, 1])]
    assert parts[0] == [bytes(16), bytes(16)]
    assert parts[1] == [digest([[5]]), digest([[6]])]
    assert fingerprint(ids, attention_mask=[0, 0, 0, 0]) == [bytes(16)]
    assert fingerprint([7], tokens=[0], attention_mask=[[0]]) == [bytes(16)]


def test_rows_of_a_packed_batch_may_hold_padding_anywhere() -> None:
    ids = [[9, 0, 1, 9, 2, 0, 9, 1]]
    want = [digest([[0, 1, 2]]), digest([[0, 1]]), bytes(16)]
    assert fingerprint(ids, attention_mask=[0, 1, 1, 0, 1, 1, 0, 1], cu_seqlens=[0, 5, 8, 8]) == want
    assert fingerprint([[9, 0, 1], [4, 5, 6]], attention_mask=[[0, 1, 1], [1, 0, 0]]) == [
        digest([[0, 1]]),
        digest([[4]]),
    ]


def test_a_table_of_a_million_tokens_with_windows_and_frames_has_the_digest_of_its_ids() -> None:
    documents = [[Text(100_000), Grid(300, 500, frames=5), Text(3), Grid(1, 70_000), Grid(70_000, 1), Text(20_000)]]
    positions = placed(documents, "mrope")
    piece = positions.slice(100_777, 800_001)
    assert fingerprint(piece) == fingerprint(piece.dense())


def test_one_id_more_or_less_counts_wherever_it_is() -> None:
    ids = placed([[Text(3), Grid(2, 3), Text(2)]], "mrope").dense()
    seen = {fingerprint(ids)[0], fingerprint(ids[:, :-1])[0], fingerprint(ids[:2])[0], fingerprint(ids[[1, 0, 2]])[0]}
    for axis, token in np.ndindex(ids.shape):
        for step in (-1, 1):
            other = ids.copy()
            other[axis, token] += step
            seen.add(fingerprint(other)[0])
    assert len(seen) == 4 + 2 * ids.size


def test_the_points_have_more_powers_than_a_document_has_tokens() -> None:
    factors = (2, 3, 5, 7, 11, 13, 31, 41, 61, 151, 331, 1321)  # the primes of P - 1
    for point in range(2):
        order = P - 1
        for factor in factors:
            while order % factor == 0 and pow(constant(f"point {point}"), order // factor, P) == 1:
                order //= factor
        assert order > 2**31


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"position_ids": [True]}, "position_ids: got bool of shape (1,), want integers or floats"),
        ({"position_ids": [[0.5, float("nan")]]}, "position_ids: got numbers that are not finite"),
        ({"position_ids": [[1e-12]]}, "position_ids: got np.float64(1e-12), want fractions with denominators below"),
        ({"position_ids": np.zeros((17, 2), int)}, "position_ids: got 17 axes, want 1 to 16"),
        ({"position_ids": [[0, 1]], "attention_mask": [[1, 2]]}, "attention_mask: got other than 0 and 1"),
        ({"position_ids": [[0, 1]], "attention_mask": [1, 1, 1]}, "attention_mask: got shape (3,), want (2,)"),
        (
            {"position_ids": np.zeros((3, 2, 4), int), "attention_mask": np.ones((4, 2))},
            "attention_mask: got shape (4, 2), want (2, 4), as position_ids",
        ),
        ({"position_ids": [[0, 1]], "cu_seqlens": [0, 3]}, "cu_seqlens: got [0, 3], want ascending"),
        ({"position_ids": [[[0, 1], [0, 1]]], "cu_seqlens": [0, 2, 4]}, "cu_seqlens: got one for a batch of 2 rows"),
        ({"position_ids": [[0.5]], "denominators": 2}, "denominators: got some for ids of float64"),
        ({"position_ids": [[1]], "denominators": 0}, "denominators[0]: got 0, want >= 1"),
        ({"position_ids": [[1, 1]], "denominators": [1, -1]}, "denominators[1]: got -1, want >= 1"),
        ({"position_ids": [[1] * 9], "denominators": 2**31}, "denominators[0]: got 2147483648, want <= 2147483647"),
        ({"position_ids": [[1]], "tokens": [0]}, "cu_seqlens: got none with tokens of a part"),
        ({"position_ids": [[1]], "tokens": [4], "cu_seqlens": [0, 4]}, "tokens[0]: got 4, want <= 3"),
        ({"position_ids": placed([[Text(1)]]), "cu_seqlens": [0, 1]}, "position_ids: got a PositionTable with other"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        fingerprint(**arguments)
    assert str(error.value).startswith(words)


def test_tensors_are_taken_from_the_host_alone_and_without_their_gradient() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[0.0, 0.5, 2.0]], requires_grad=True)
    assert fingerprint(ids, attention_mask=torch.tensor([1, 1, 0])) == fingerprint([[0.0, 0.5]])
    assert same_positions(ids, [[0.0, 0.5, 2.0]]).equal
    numbers = {"position_ids": [[1]], "attention_mask": [1], "cu_seqlens": [0, 1], "denominators": [1], "tokens": [0]}
    for name in numbers:
        with pytest.raises(InvalidInputError) as error:
            fingerprint(**{**numbers, name: torch.ones(1, device="meta")})
        assert str(error.value) == f"{name}: got a tensor on meta, want one on the host, as its .cpu() is"
    with pytest.raises(InvalidInputError) as error:
        fingerprint(torch.ones(1, 3, dtype=torch.bfloat16))
    assert str(error.value) == (
        "position_ids: got bfloat16, which rounds integers above 256, "
        "want int32, int64, float32 or float64 that was never cast to it"
    )


def test_parts_that_are_no_digests_are_named() -> None:
    wrong: tuple[tuple[Any, str], ...] = (
        ([], "parts: got none"),
        ([[bytes(16)], []], "parts[1]: got 0 digests, want 1"),
        ([[b"abc"]], "parts[0][0]: got b'abc', want 16 bytes"),
        (3, "parts: got int, want a list"),
        ((part for part in [[bytes(16)]]), "parts: got generator, want a list"),
        ([3], "parts[0]: got int, want a list of digests"),
        ([[bytes(16)], [b"~" * 16]], "parts[1][0]: got b'~~~~~~~~~~~~~~~~', want two sums below 2**61 - 1"),
    )
    for parts, words in wrong:
        with pytest.raises(InvalidInputError) as error:
            merge(parts)
        assert str(error.value).startswith(words)


def test_c_declines_what_would_leave_its_arrays() -> None:
    core = native.core
    if core is None:
        pytest.skip("the extension was not built")
    powers, factors = np.ones((2, 256), np.int64), np.ones((2, 2), np.int64)
    table = np.array([[0], [0], [1], [4], [1], [0], [0], [0], [1]])
    sources = {False: np.arange(4)[None], True: table}
    good = [0, 4, 0, 0]
    for placed_ in (False, True):
        sums, columns = np.zeros((1, 2), np.int64), sources[placed_].shape[1]
        assert core.sums(sources[placed_], placed_, np.array(good)[:, None], None, powers, factors, sums, True)
        assert sums.tolist() == [[4 + 6, 4 + 6]]
        for row, value in (
            (0, -1),
            (0, 5),
            (0, 2**62),
            (1, -1),
            (1, 2**62),
            (2, 1),
            (2, -1),
            (3, -1),
        ):
            bad = np.array(good)[:, None]
            bad[row] = value
            assert not core.sums(sources[placed_], placed_, bad, None, powers, factors, sums, True)
        run, ones = np.array(good)[:, None], np.ones(columns + 1, np.int64)
        assert core.sums(sources[placed_], placed_, run, ones[:-1], powers, factors, sums, True)
        for over in (ones, ones[:0], ones[:-1].astype(float), ones[:-1] - 1, -ones[:-1], ones[:-1] << 31):
            for each in (over, np.broadcast_to(over[:1], columns)) if over.size == columns else (over,):
                assert not core.sums(sources[placed_], placed_, run, each, powers, factors, sums, True)
    for row in (2, 3):
        for value in (0, -1, 2**31):
            bad = table.copy()
            bad[row] = value
            assert not core.sums(bad, True, run, None, powers, factors, np.zeros((1, 2), int), True)
    halves = np.array([[0.5, -3, 0.25, 7 / 256]])
    for dtype in (np.float32, np.float64):
        for wide in (False, True):
            assert core.sums(halves.astype(dtype), False, run, None, powers, factors, sums, wide)
            for beyond in (1e-12, np.pi * 1e-5, 2**31, 2**63, 2**64, 1e30, -(2**31) - 256, np.inf, -np.inf, np.nan):
                bad = halves.astype(dtype)
                bad[0, 2] = beyond
                assert not core.sums(bad, False, run, None, powers, factors, sums, wide), beyond


WANT = placed([[Text(3), Grid(2, 3), Text(2)], [Text(4)]], "mrope")
IDS = WANT.dense()
PACKED = {"position_ids": IDS, "cu_seqlens": [0, 11, 15]}


def told(a: Any, b: Any = WANT) -> str:
    return str(same_positions(a, b))


def test_equal_positions_are_equal_however_they_come() -> None:
    ids, mask = WANT.padded(side="left")
    said = "All 15 tokens of 2 documents have the ids of mrope."
    assert told(PACKED) == told({"position_ids": ids, "attention_mask": mask}) == told(WANT.pad(), WANT) == said
    assert told(WANT, PACKED) == "All 15 tokens of 2 documents have the ids of b."


def test_the_first_difference_is_named_with_both_values_and_its_cause() -> None:
    said = "got (4, 3, 3), want (3, 4, 3) in {}. 3 of 15 tokens differ, in 1 of 2 documents. Cause: axes are swapped"
    swapped = {**PACKED, "position_ids": IDS[[1, 0, 2]]}
    where = "documents[0], token 6, is frame 0, row 1, column 0 of a grid of width 3 (segment 1): "
    assert told(swapped).startswith(where + said.format("mrope"))
    assert told(swapped, PACKED).startswith("documents[0], token 6, is one of 11 tokens: " + said.format("b"))
    one = IDS.copy()
    one[2, 12] = 7
    diagnosis = same_positions({**PACKED, "position_ids": one}, PACKED)
    assert (diagnosis.document, diagnosis.token, diagnosis.axis) == (1, 1, 2)
    assert diagnosis.got == (1, 1, 7)
    assert diagnosis.want == (Fraction(1),) * 3


def test_ids_alone_are_enough_to_find_a_cause() -> None:
    assert "documents start at 2, not at 0." in told({**PACKED, "position_ids": IDS + 2}, PACKED)
    index = np.broadcast_to(np.r_[:11, :4], (3, 15))
    assert "ids are the token's index in its document" in told({**PACKED, "position_ids": index}, PACKED)
    halves = placed([[Text(3), Grid(2, 3), Text(2)]], "rope-tie-v2")
    assert "fractions are cut off" in told(np.trunc(halves.dense()), halves.dense())


def test_documents_in_another_order_are_told() -> None:
    turned = {"position_ids": np.roll(IDS, 4, axis=1), "cu_seqlens": [0, 4, 15]}
    assert "Cause: documents stand in another order: documents[0] has the ids of documents[1]." in told(turned)


def test_documents_of_other_lengths_are_told() -> None:
    short = {"position_ids": IDS[:, :14], "cu_seqlens": [0, 11, 14]}
    assert told(short) == (
        "documents[1], token 3, is token 3 of a run of text (segment 3): got no token, want (3, 3, 3) in mrope. "
        "1 of 15 tokens differ, in 1 of 2 documents. Cause: documents[1] has 3 tokens and should have 4. "
        "To do: give both sides the same tokens, and a mask of those that are padding."
    )
    assert told(WANT, short).startswith(
        "documents[1], token 3, is one token too many: got (3, 3, 3), want no token in b. 1 of 15"
    )
    late = {"position_ids": IDS[:, 1:], "cu_seqlens": [0, 10, 14]}
    assert told(late).startswith(
        "documents[0], token 0, is token 0 of a run of text (segment 0): got (1, 1, 1), want (0,"
    )


def test_a_text_row_on_one_side_is_told_from_an_axis() -> None:
    with_text_row: dict[str, Any] = {**PACKED, "position_ids": np.concatenate([[np.r_[:11, :4]], IDS])}
    hint = "; Transformers' text row is no axis: leave it out, as position_ids[1:]"
    for a, b, words in (
        (with_text_row, WANT, "a: got 4 axes, want 3, as b has" + hint),
        (PACKED, with_text_row, "a: got 3 axes, want 4, as b has" + hint),
        (PACKED, placed([[Text(11)], [Text(4)]], "xd-rope"), "a: got 3 axes, want 4, as b has"),
        (PACKED, {**PACKED, "position_ids": IDS[:1]}, "a: got 3 axes, want 1, as b has"),
    ):
        with pytest.raises(InvalidInputError) as error:
            same_positions(a, b)
        assert str(error.value) == words
    assert same_positions({**PACKED, "position_ids": with_text_row["position_ids"][1:]}, WANT).equal


def test_sides_that_cannot_be_compared_are_refused() -> None:
    for a, words in (
        (IDS, "a: got 1 document, want 2, as b has"),
        ({**PACKED, "position_ids": IDS[:2]}, "a: got 2 axes, want 3, as b has"),
        ({**PACKED, "input_ids": []}, "a: got the arguments position_ids, cu_seqlens, input_ids, want position_ids"),
        ({**PACKED, "cu_seqlens": [0, 9]}, "a.cu_seqlens: got [0, 9], want ascending integers from 0 to 15"),
    ):
        with pytest.raises(InvalidInputError) as error:
            same_positions(a, WANT)
        assert str(error.value).startswith(words)
    close = [{"position_ids": [[2**60 + extra]], "denominators": 2**30} for extra in (0, 1)]
    with pytest.raises(InvalidInputError, match="that float64 cannot tell from b's"):
        same_positions(*close)


@settings(max_examples=60)
@given(DOCUMENTS, SCHEMES, st.data())
def test_digests_and_comparison_agree(documents: list[list[Any]], scheme: str | Scheme, data: st.DataObject) -> None:
    positions = placed(documents, scheme)
    numerators, denominators = positions.rationals()
    at = data.draw(st.integers(0, numerators.size - 1))
    more = data.draw(st.sampled_from([0, 1, -3, 2**20]))  # of a fraction, as many parts of its denominator
    numerators.flat[at] += more
    ids = numerators / denominators if positions.fractional else numerators
    side = {"position_ids": ids, "cu_seqlens": positions.cu_seqlens}
    diagnosis = same_positions(side, positions)
    assert diagnosis.equal == (fingerprint(**side) == fingerprint(positions))
    assert diagnosis.equal == bool((ids == positions.dense()).all())
    assert diagnosis.equal or diagnosis.axis == at // positions.num_tokens
