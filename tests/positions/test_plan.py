"""A plan places documents exactly as the general path does, and declines documents that it cannot place."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts_by_hand import LAYOUTS
from oracle import CASES, batches

from mmpos import Grid, InvalidInputError, MmposError, PositionTable, SegmentTable, SequenceBuilder, Text, place
from mmpos.__main__ import main
from mmpos.positions import plan
from mmpos.positions.plan import forget_plans, place_by_plan
from mmpos.schemes import (
    Grids,
    Lumina2,
    Placement,
    QwenImage,
    RopeTie,
    Scheme,
    TextRuns,
    Wan,
    get_scheme,
)
from mmpos.segments.kinds import Segment
from mmpos.support import native

TIMES: list[list[Fraction | None]] = [[None], [Fraction(1, 16)], [Fraction(1, 24)], [Fraction(1, 24), None]]
"""Seconds per frame of alternating grids."""

START = st.one_of(st.integers(-5, 50), st.sampled_from([-(2**31), 2**31 - 1, 2**31 - 20]))


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Clear the plans."""
    forget_plans()


def outcome(segments: SegmentTable, scheme: str | Scheme, start: Any, strict: bool | None) -> Any:
    """Place segments; return the contents of the table, or the type and message of the error."""
    try:
        positions = place(segments, scheme, start, strict)
    except MmposError as error:
        return type(error), str(error)
    rows = positions.table.tolist(), positions.documents.tolist()
    return *rows, positions.num_tokens, positions.fractional, positions.scheme


def by_plan(segments: SegmentTable, scheme: str | Scheme, start: Any = 0) -> PositionTable | None:
    return place_by_plan(get_scheme(scheme), segments, start, False)


@given(st.data(), START, st.sampled_from([None, False, True]))
def test_a_plan_gives_the_same_table_as_the_general_path(data: st.DataObject, start: int, strict: bool | None) -> None:
    case = data.draw(st.sampled_from(CASES))
    segments = SegmentTable.from_documents(data.draw(batches(case)))
    starts: Any = data.draw(st.sampled_from([start, np.full(segments.num_documents, start)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "core", None)
        want = outcome(segments, case.scheme, starts, strict)
    assert outcome(segments, case.scheme, starts, strict) == want


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_plan_places_layouts_of_generative_models_as_the_general_path_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, rng = get_scheme(LAYOUTS[case][0]), np.random.default_rng(33)
    core = native.core
    texts: list[Segment] = [Text(1), Text(4), Text(2)] * 2 if scheme.text else []
    for start in (0, 7, -3, 2**31 - 12, -(2**31)):
        for times in TIMES:
            frames = int(rng.integers(1, 4)) if scheme.frames else 1
            sides = zip(rng.integers(1, (7, 7, frames + 1), (8, 3)).tolist(), times * 8, strict=False)
            parts: list[Segment] = [*(Grid(h, w, frames=n, seconds_per_frame=t) for (h, w, n), t in sides), *texts]
            documents = [[parts[i] for i in rng.integers(len(parts), size=n)] for n in (1, *rng.integers(1, 7, 3))]
            segments = SegmentTable.from_documents(documents)
            monkeypatch.setattr(native, "core", None)
            want = outcome(segments, scheme, start, None)
            monkeypatch.setattr(native, "core", core)
            assert outcome(segments, scheme, start, None) == want


@pytest.mark.parametrize(
    ("scheme", "planned"),
    [("flux", True), ("flux2", True), ("qwen-image", True), ("longcat-image", True), ("bagel", True),
     (Lumina2(image_at=9), True), (QwenImage(layered=True), False), (Wan(beside=True), False), ("anyflow-far", False),
     ("joyimage", False)],
)  # fmt: skip
def test_counted_references_are_placed_by_a_plan_and_all_others_are_not(scheme: str | Scheme, planned: bool) -> None:
    text = [Text(3)] if get_scheme(scheme).text else []
    document: list[Segment] = [*text, Grid(2, 3), Grid(4, 2), Grid(2, 3)]
    assert (by_plan(SegmentTable.from_documents([document]), scheme) is not None) == planned


@pytest.mark.parametrize("scheme", ["lumina2", "hunyuan-image", "cosmos", "wan", Lumina2(image_first=True)])
def test_a_plan_declines_documents_with_several_grids_if_the_scheme_refuses_them(scheme: str | Scheme) -> None:
    grid = Grid(2, 3)
    assert by_plan(SegmentTable.from_documents([[grid], [grid]]), scheme) is not None
    assert by_plan(SegmentTable.from_documents([[grid], [grid, grid]]), scheme) is None


@pytest.mark.parametrize("shapes", [1, 3, 5])
def test_a_plan_that_is_full_starts_over(shapes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_SHAPES", 4)
    for side in (*range(1, 12), *range(1, 12)):
        segments = SegmentTable.from_documents([[Text(1), Grid(side, side + i), Text(2)] for i in range(shapes)])
        positions = by_plan(segments, "rope-tie") if shapes <= 4 else place(segments)
        assert positions is not None
        consumed = [(side + 1) * (side + i + 1) - 1 for i in range(shapes)]
        assert positions.next_positions.tolist() == [3 + ids for ids in consumed]
        assert (by_plan(segments, "rope-tie") is None) == (shapes > 4)


def test_threads_share_a_plan() -> None:
    tables = [SegmentTable.from_documents([[Text(1), Grid(i % 37 + 1, i % 41 + 1), Text(1)]]) for i in range(400)]
    with ThreadPoolExecutor(8) as threads:
        tables_of_threads = list(threads.map(lambda segments: place(segments).table.tolist(), tables))
    forget_plans()
    assert tables_of_threads == [place(segments).table.tolist() for segments in tables]


@pytest.mark.parametrize("scheme", [RopeTie(axes=3), "mrope", "mrope-qwen3", "videorope", "vrope"])
def test_unused_times_change_neither_the_plan_nor_the_ids(scheme: str | Scheme) -> None:
    frames = 3 if get_scheme(scheme).frames else 1
    grids = [Grid(2, 4, frames=frames, seconds_per_frame=time) for time in (None, Fraction(1, 24), Fraction(1, 30))]
    tables = [by_plan(SegmentTable.from_documents([[Text(2), grid, Text(1)]]), scheme) for grid in grids]
    ids = [None if table is None else table.dense().tolist() for table in tables]
    assert ids[0] is not None
    assert ids[0] == ids[1] == ids[2]


def test_new_times_do_not_discard_the_plans_of_other_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    image = SegmentTable.from_documents([[Text(3), Grid(2, 3)]])
    place(image)
    monkeypatch.setattr(RopeTie, "consumed", None)  # not called again
    for n in range(70):
        place(SegmentTable.from_documents([[Grid(2, 3, frames=4, seconds_per_frame=Fraction(1, 20 + n))]]), "cosmos")
    assert place(image).num_tokens == 9


def test_a_scheme_is_called_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    consumed = RopeTie.consumed

    def recording(self: RopeTie, sides: Any) -> Any:
        calls.append(sides)
        return consumed(self, sides)

    monkeypatch.setattr(RopeTie, "consumed", recording)
    for _ in range(3):
        place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2), Grid(2, 3), Text(1)]]))
    assert len(calls) == 1


def test_separate_frames_and_counting_schemes_take_the_general_path() -> None:
    image, video = (SegmentTable.from_documents([[Text(1), Grid(2, 3, frames=n)]]) for n in (1, 2))
    timed = SegmentTable.from_documents([[Text(1), Grid(2, 3, frames=2, seconds_per_frame=1)]])
    assert by_plan(image, "mrope-qwen2.5") is not None
    assert by_plan(video, "mrope-qwen2.5") is None
    assert by_plan(timed, "mrope-qwen2.5") is None
    for scheme in ("xd-rope", "rows", "grid-2d", "tmrope", "mrope-canvas"):
        assert by_plan(image, scheme) is None


@dataclass(frozen=True)
class Stretched(Scheme):
    """A custom scheme that depends only on the shape."""

    name: ClassVar[str] = "stretched"
    linear_in = ("cursor",)
    axes = 2
    factor: Any = 1
    failing: bool = False
    calls: list[int] = field(default_factory=list, compare=False)

    def advance(self, grids: Grids) -> Any:
        if self.failing:
            raise InvalidInputError("stretched: got no luck, want some")
        self.calls.append(grids.width.size)
        return self.factor * grids.width

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement([cursor, cursor], step_row=[self.factor, 0], step_col=[0, self.factor])


@dataclass(frozen=True)
class Inherited(Stretched):
    """A subclass that does not set linear_in itself; its ids depend on more than the shape."""

    def place(self, grids: Grids, cursor: Any) -> Placement:
        return Placement([grids.document, cursor], step_row=[1, 0], step_col=[0, 1])


@dataclass(frozen=True)
class Spoken(Stretched):
    """A scheme whose text ids depend on more than the cursor and the first id of the document."""

    linear_in = ("cursor",)

    def place_text(self, runs: TextRuns, cursor: Any) -> Placement:
        return Placement([cursor, cursor], step_col=[1, runs.lengths])


def test_text_that_ignores_the_cursor_takes_the_general_path() -> None:
    image, both = (SegmentTable.from_documents([[*[Text(2)] * n, Grid(2, 3)]]) for n in (0, 1))
    assert by_plan(image, Spoken()) is not None
    assert by_plan(both, Spoken()) is None
    assert place(both, Spoken()).dense().tolist() == [[0, 1, 2, 2, 2, 3, 3, 3], [0, 2, 2, 3, 4, 2, 3, 4]]


def test_custom_schemes_may_have_plans() -> None:
    segments = SegmentTable.from_documents([[Text(1), Grid(2, 3), Text(1)]])
    scheme = Stretched(2)
    for _ in range(3):
        assert place(segments, scheme).next_positions.tolist() == [8]
    assert len(scheme.calls) == 1
    assert place(segments, Stretched(5)).next_positions.tolist() == [17]  # a different key
    assert by_plan(segments, Inherited(2)) is None
    assert by_plan(segments, Stretched([1])) is None  # not hashable
    with pytest.raises(InvalidInputError, match=r"^stretched: got no luck, want some$"):
        place(segments, Stretched(failing=True))
    with pytest.raises(InvalidInputError, match=r"^scheme 'stretched': got advance float64, want integers$"):
        place(segments, Stretched(1.5))


def test_a_refused_shape_does_not_prevent_others_from_being_planned() -> None:
    scheme = "mrope-qwen2.5"
    place(SegmentTable.from_documents([[Text(1), Grid(2, 3)]]), scheme)
    with pytest.raises(MmposError, match=r"^documents\[0\]\[0\]: got 2 frames without a time, want seconds_per_frame"):
        place(SegmentTable.from_documents([[Grid(1, 1, frames=2)], [Grid(4, 4)]]), scheme)
    assert by_plan(SegmentTable.from_documents([[Grid(2, 3), Text(1), Grid(4, 4)]]), scheme) is not None


def test_without_the_extension_the_first_placed_batch_warns_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "core", None)
    segments = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)]])
    native.warn_slow.cache_clear()
    with pytest.warns(RuntimeWarning) as warned:
        assert [place(segments, scheme).scheme for scheme in ("mrope", "flatten")] == ["mrope", "flatten"]
    [warning] = warned
    assert warning.filename == __file__
    said = str(warning.message)
    assert said.startswith("the C extension of mmpos was not built, so calls take 10 to 300 times as long")
    assert "multimodal-positions (in a clone: pip install -e .)" in said
    native.warn_slow.cache_clear()
    with pytest.warns(RuntimeWarning) as deeper:
        SequenceBuilder().build(["a"])
    assert [warning.filename for warning in deeper] == [__file__]
    native.warn_slow.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["positions", "3,2x3", "2"]) == 0
    assert capsys.readouterr().err == f"mmpos: warning: {said}\n"
