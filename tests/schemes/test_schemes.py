"""Schemes: ids of every scheme are compared with the oracle and with literals from the literature."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, Case, batches, exact, place_document, placed, settled

from mmpos import Grid, InvalidInputError, Scheme, SegmentTable, Text, diagnose, place
from mmpos.schemes import SCHEMES, MRopeQwen25, RopeTieV2, XDRope, get_scheme

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
STARTS = st.integers(-20, 10_000)


@EVERY_CASE
@settled
@given(data=st.data())
def test_ids_of_a_batch_equal_those_of_the_oracle(case: Case, data: st.DataObject) -> None:
    batch = data.draw(batches(case))
    start: int | list[int] = data.draw(STARTS)
    if case.resumable and data.draw(st.booleans()):
        start = data.draw(st.lists(STARTS, min_size=len(batch), max_size=len(batch)))
    starts = start if isinstance(start, list) else [start] * len(batch)
    positions = place(SegmentTable.from_documents(batch), case.scheme, start)
    want = [place_document(one, case.name, at, **case.params) for one, at in zip(batch, starts, strict=True)]
    ids = [position for document in want for position in document.ids]
    lengths = [len(document.ids) for document in want]
    assert exact(positions) == ids
    assert positions.dense().T.tolist() == [[float(value) for value in position] for position in ids]
    assert positions.lengths.tolist() == lengths
    if case.resumable:
        nexts = [document.next_position or 0 for document in want]
        assert positions.next_positions.tolist() == nexts
        assert positions.deltas.tolist() == [n - s - t for n, s, t in zip(nexts, starts, lengths, strict=True)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("scheme", ["mrope-qwen2.5", "tmrope", "tmrope-qwen3", "ltx", "ltx2", "cosmos", "cosmos3"])
def test_missing_seconds_are_not_guessed(scheme: str) -> None:
    still = Grid(2, 3, seconds_per_frame=1 if scheme == "ltx2" else None)
    segments = SegmentTable.from_documents([[still], [Grid(1, 1, frames=3)]])
    for _ in range(2):  # the second call finds the plan of the first
        with pytest.raises(InvalidInputError) as raised:
            place(segments, scheme)
        assert str(raised.value) == (
            "documents[1][0]: got 3 frames without a time, want seconds_per_frame of the grid or video, such as 1/fps, "
            "because ids of this scheme depend on it"
        )
    assert placed([still], scheme).num_tokens == 6
    if get_scheme(scheme).keyframes:
        with pytest.raises(InvalidInputError, match=r"^documents\[0\]\[0\]: got 1 frame without a time, want sec"):
            placed([Grid(1, 1, first_frame=80)], scheme)


def test_xd_rope_counting_over_the_batch_continues_after_the_number_of_the_last_image() -> None:
    """The last of four one-token documents has ids 0, 0, 0, 3, so its next position is 4."""
    segments = SegmentTable.from_documents([[Grid(1, 1)]] * 4)
    positions = place(segments, XDRope(counting="batch"))
    assert positions.dense().tolist() == [[0] * 4, [0] * 4, [0] * 4, [0, 1, 2, 3]]
    assert positions.next_positions.tolist() == [1, 2, 3, 4]
    assert positions.deltas.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_name_specifies_a_scheme_with_default_parameters(name: str) -> None:
    assert (get_scheme(name), get_scheme(name).label) == (SCHEMES[name](), name)


@dataclass(frozen=True)
class Wide(RopeTieV2):
    """A scheme with a parameter without a default."""

    name: ClassVar[str] = "wide"
    width: int = field(kw_only=True)


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        ("rope-tie", "rope-tie"),
        (RopeTieV2(), "rope-tie-v2"),
        (RopeTieV2(rounding="floor"), "rope-tie-v2(rounding=floor)"),
        (RopeTieV2(axes=3, rounding="floor"), "rope-tie-v2(axes=3, rounding=floor)"),
        (MRopeQwen25(tokens_per_second=Fraction(25, 2)), "mrope-qwen2.5(tokens_per_second=25/2)"),
        (Wide(width=3), "wide(width=3)"),
    ],
    ids=str,
)
def test_the_label_of_a_scheme_contains_its_non_default_parameters(scheme: str | Scheme, label: str) -> None:
    segments = SegmentTable.from_documents([[Text(1), Grid(1, 1), Text(1)]])
    assert get_scheme(scheme).label == label
    assert place(segments, scheme).scheme == label
    assert repr(place(segments, scheme)).endswith(f"scheme={label!r})")
    ids = place(segments, scheme).dense()
    assert str(diagnose(ids, segments, scheme)) == f"All 3 tokens of 1 document have the ids of {label}."
