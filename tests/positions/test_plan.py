"""A plan places documents exactly as the general path does, and declines documents that it cannot place."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from oracle import CASES
from twins import both

from mmpos import (
    SCHEMES,
    Grid,
    InvalidInputError,
    MmposError,
    PositionTable,
    SegmentTable,
    SequenceBuilder,
    Text,
    place,
)
from mmpos.__main__ import main
from mmpos.positions import plan
from mmpos.positions.plan import forget_plans, place_by_plan
from mmpos.schemes import (
    CogVideoX,
    Cosmos3,
    Flux3,
    Grids,
    HunyuanImage,
    JoyImage,
    Kandinsky,
    Ltx2,
    Lumina2,
    MiniMaxH3,
    Placement,
    QwenImage,
    RopeTie,
    Scheme,
    TextRuns,
    Wan,
    get_scheme,
)
from mmpos.segments import Audio
from mmpos.segments.kinds import Segment
from mmpos.support import native

VARIANTS = [
    CogVideoX(base_height=2, base_width=4), Cosmos3(margin=0), Flux3(row_step=1, col_step=Fraction(1, 3)),
    HunyuanImage(axes=3), JoyImage(text_runs=True), Kandinsky(frame_step=Fraction(1, 2)), Ltx2(axes=1),
    Lumina2(first=1), Lumina2(image_first=True), Lumina2(first=1, image_at=9), MiniMaxH3(), QwenImage(layered=True),
    Wan(skip_length=8), Wan(beside=True),
]  # fmt: skip
"""Generation schemes with parameters."""

EVERY = {get_scheme(scheme).label: scheme for scheme in (*SCHEMES, *(case.scheme for case in CASES), *VARIANTS)}


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Clear the plans."""
    forget_plans()


def by_plan(segments: SegmentTable, scheme: str | Scheme, start: Any = 0) -> PositionTable | None:
    return place_by_plan(get_scheme(scheme), segments, start, False)


def random_document(random: Random, scheme: Scheme, odd: float) -> list[Segment]:
    """Draw a document; with probability ``odd`` a part is one that the scheme may refuse."""
    document: list[Segment] = []
    for _ in range(random.randint(1, 6)):
        anything = random.random() < odd
        kind = random.choice([Grid, Text, Text, Audio] if anything or (scheme.text and scheme.audio) else [Grid, Text])
        if kind is Grid or not (scheme.text or anything):
            if not (scheme.references or anything) and any(isinstance(part, Grid) for part in document):
                continue
            frames = random.randint(1, 3) if anything or scheme.frames else 1
            seconds = random.choice([None, Fraction(1, 16), Fraction(1, 24)]) if scheme.timed or anything else None
            rows = (anything or scheme.row_separators) and random.random() < 0.3
            side = 2 if "merged" in scheme.label else 1
            sides = (side * random.randint(1, 5) for _ in range(2))
            document.append(Grid(*sides, frames=frames, seconds_per_frame=seconds, row_separator=rows))
            continue
        document.append(kind(random.randint(1, 4)))
    return document


@pytest.mark.parametrize("label", EVERY)
def test_a_plan_gives_the_same_table_or_error_as_the_general_path(label: str) -> None:
    random, scheme, valid = Random(label), get_scheme(EVERY[label]), 0
    for i in range(60):
        batch = [random_document(random, scheme, odd=0.1 * (i % 3)) for _ in range(random.randint(1, 4))]
        segments = SegmentTable.from_documents(batch)
        start: Any = random.choice([0, 7, -3, 2**31 - 20, -(2**31), random.randint(-5, 50)])
        start = np.full(len(batch), start) if random.random() < 0.2 else start
        strict = random.choice([None, None, False, True])
        valid += isinstance(both(partial(place, segments, scheme, start, strict)), PositionTable)
    assert valid >= 3


@dataclass(frozen=True)
class Stretched(Scheme):
    """A custom scheme that depends only on the shape."""

    name: ClassVar[str] = "stretched"
    linear_in = ("cursor",)
    axes = 2
    factor: Any = 1
    failing: int = 0
    calls: list[int] = field(default_factory=list, compare=False)

    def advance(self, grids: Grids) -> Any:
        if (grids.height == self.failing).any():
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


GRID, VIDEO, TIMED = Grid(2, 3), Grid(2, 3, frames=2), Grid(2, 4, frames=2, seconds_per_frame=1)
SEVERAL: list[Any] = [Text(3), GRID, Grid(4, 2), GRID]
PLANNED: list[tuple[Any, list[Any], bool]] = [
    *((scheme, SEVERAL, True) for scheme in ("flux", "flux2", "qwen-image", "longcat-image", "bagel")),
    (Lumina2(image_at=9), SEVERAL, True),
    *((scheme, SEVERAL[1:], False) for scheme in (QwenImage(layered=True), Wan(beside=True), "anyflow-far")),
    ("joyimage", SEVERAL, False),
    *((scheme, [GRID, *[GRID] * several], not several)  # the scheme refuses several grids
      for scheme in ("lumina2", "hunyuan-image", "cosmos", "wan", Lumina2(image_first=True)) for several in (0, 1)),
    *(("mrope-qwen2.5", [Text(1), grid], grid is GRID) for grid in (GRID, VIDEO, TIMED)),
    *((scheme, [Text(1), GRID], False) for scheme in ("xd-rope", "rows", "grid-2d", "tmrope", "mrope-canvas")),
    *((scheme, [Text(2), TIMED], True) for scheme in (RopeTie(axes=3), "mrope", "videorope", "vrope")),  # unused times
    *((scheme, [Text(2), Grid(2, 4, seconds_per_frame=1)], True) for scheme in ("mrope-qwen2.5", "mrope-qwen3")),
    (Stretched(2), [Text(1), GRID], True),
    (Stretched([1]), [Text(1), GRID], False),  # not hashable
    (Inherited(2), [Text(1), GRID], False),
    (Spoken(), [GRID], True),
    (Spoken(), [Text(2), GRID], False),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "document", "planned"), PLANNED)
def test_a_plan_places_documents_whose_ids_depend_on_shapes_only(
    scheme: str | Scheme, document: list[Segment], planned: bool
) -> None:
    segments = SegmentTable.from_documents([document[:1], document])
    assert (by_plan(segments, scheme) is not None) == planned


def test_text_that_ignores_the_cursor_takes_the_general_path() -> None:
    ids = place(SegmentTable.from_documents([[Text(2), GRID]]), Spoken()).dense().tolist()
    assert ids == [[0, 1, 2, 2, 2, 3, 3, 3], [0, 2, 2, 3, 4, 2, 3, 4]]


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
        known = plan.plan_of(get_scheme("rope-tie"))
        assert known is not None
        assert (known.table[1:, 0] > 0).sum() <= 4


def test_threads_share_a_plan() -> None:
    tables = [SegmentTable.from_documents([[Text(1), Grid(i % 37 + 1, i % 41 + 1), Text(1)]]) for i in range(400)]
    with ThreadPoolExecutor(8) as threads:
        tables_of_threads = list(threads.map(lambda segments: place(segments).table.tolist(), tables))
    forget_plans()
    assert tables_of_threads == [place(segments).table.tolist() for segments in tables]


def test_a_scheme_is_called_once_per_shape_and_new_times_do_not_discard_its_plan() -> None:
    segments, scheme = SegmentTable.from_documents([[Text(1), GRID, Text(1), GRID]]), Stretched(2)
    for n in range(70):
        assert place(segments, scheme).next_positions.tolist() == [14]
        place(SegmentTable.from_documents([[Grid(2, 3, frames=4, seconds_per_frame=Fraction(1, 20 + n))]]), "cosmos")
    assert len(scheme.calls) == 1
    assert place(segments, Stretched(5)).next_positions.tolist() == [32]  # a different key


def test_errors_of_a_scheme_are_raised_and_do_not_prevent_plans_of_other_shapes() -> None:
    segments = SegmentTable.from_documents([[Text(1), GRID, Text(1)]])
    with pytest.raises(InvalidInputError, match=r"^stretched: got no luck, want some$"):
        place(segments, Stretched(failing=2))
    documents: list[list[Segment]] = [[Text(1), Grid(side, 1)] for side in (1, 2, 3)]
    scheme = Stretched(failing=1)
    with pytest.raises(InvalidInputError, match=r"^stretched: got no luck, want some$"):
        place(SegmentTable.from_documents(documents), scheme)
    calls = len(scheme.calls)
    assert by_plan(SegmentTable.from_documents(documents[1:]), scheme) is not None
    assert len(scheme.calls) == calls  # the plan has the other shapes
    with pytest.raises(InvalidInputError, match=r"^scheme 'stretched': got advance float64, want integers$"):
        place(segments, Stretched(1.5))
    place(segments, "mrope-qwen2.5")
    with pytest.raises(MmposError, match=r"^documents\[0\]\[0\]: got 2 frames without a time, want seconds_per_frame"):
        place(SegmentTable.from_documents([[Grid(1, 1, frames=2)], [Grid(4, 4)]]), "mrope-qwen2.5")
    assert by_plan(SegmentTable.from_documents([[GRID, Text(1), Grid(4, 4)]]), "mrope-qwen2.5") is not None


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
