"""The experiment asks what it says, positions reach its model, it repeats, and the page says what it found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import neighbours
import numpy as np
import pytest
import torch
from neighbours import Results
from neighbours_training import (
    DIRECTIONS,
    NONE,
    Batch,
    Outcome,
    Setup,
    Shape,
    Sizes,
    Task,
    answers,
    draw_batch,
    model_for,
    train,
)
from tolerance import assert_within, printed, rounding

import mmpos
from mmpos.errors import InvalidInputError

TASK = Task(colours=64, questions=5, filler=3)
SMALL = replace(neighbours.QUICK, task=TASK)


def drawn(sizes: Sizes, count: int = 40, seed: int = 0) -> Batch:
    return draw_batch(TASK, sizes, count, np.random.default_rng(seed))


def kept() -> list[Results]:
    """The figures of every machine."""
    results = neighbours.kept_results()
    assert results
    return results


def images(batch: Batch) -> list[tuple[int, list[list[int]]]]:
    """The filler words before each image, and its colours by rows."""
    found = []
    for d, ids in enumerate(batch.input_ids.tolist()):
        text, grid, _ = range(*batch.segments.segment_offsets[d : d + 2])
        before = int(batch.segments.extents[:, text].prod())
        _, height, width = batch.segments.extents[:, grid].tolist()
        assert ids[:before] == [TASK.filler_id] * before
        found.append((before, [ids[before + width * row :][:width] for row in range(height)]))
    return found


@pytest.mark.parametrize("sizes", [Sizes((2, 5), (2, 5)), Sizes((2, 3), (9, 14), turned=True)])
def test_answers_are_the_colours_beside_and_below(sizes: Sizes) -> None:
    batch = drawn(sizes)
    for d, (before, rows) in enumerate(images(batch)):
        assert sorted({colour for row in rows for colour in row}) == sorted(colour for row in rows for colour in row)
        assert batch.patches[d] == len(rows) * len(rows[0])
        for i in range(TASK.questions):
            column = before + batch.patches[d] + 2 * i
            assert batch.asked[d, i] == column + 1
            direction, colour = batch.input_ids[d, column : column + 2].tolist()
            assert direction == TASK.colours + batch.directions[d, i]
            ((row, col),) = ((r, c) for r, line in enumerate(rows) for c, one in enumerate(line) if one == colour)
            right = DIRECTIONS[batch.directions[d, i]] == "right"
            assert batch.answers[d, i] == (rows[row][col + 1] if right else rows[row + 1][col])


def test_sizes_questions_and_filler_take_every_value() -> None:
    batch = drawn(Sizes((2, 3), (4, 5), turned=True), 200)
    shapes = {(len(rows), len(rows[0])) for _, rows in images(batch)}
    assert shapes == {(h, w) for a, b in ((2, 4), (2, 5), (3, 4), (3, 5)) for h, w in ((a, b), (b, a))}
    assert {before for before, _ in images(batch)} == {1, 2, 3}
    assert set(batch.directions.flat) == {0, 1}
    asked = drawn(Sizes((2, 2), (2, 2)), 200)
    cells = {  # of a 2×2 image: its left column has patches to the right, its upper row has patches below
        (int(direction), [one for row in rows for one in row].index(colour))
        for (_, rows), directions, line in zip(images(asked), asked.directions, asked.answers.tolist(), strict=True)
        for direction, colour in zip(directions, line, strict=True)
    }
    assert cells == {(0, 1), (0, 3), (1, 2), (1, 3)}


def test_every_scheme_for_text_and_images_is_tried_once() -> None:
    batch = drawn(Sizes((2, 5), (2, 5)))

    def ids(scheme: str) -> tuple[object, ...]:
        found = mmpos.place(batch.segments, scheme).dense()
        return found.shape, found.astype(np.float64).tobytes()

    tried = {ids(scheme) for scheme in neighbours.PLACED}
    assert len(tried) == len(neighbours.PLACED)
    untried = {"xd-rope", "mrope-canvas"}  # which number images, and count markers, as one model does
    assert {ids(name) for name in mmpos.SCHEMES.keys() - untried if mmpos.SCHEMES[name].text} == tried


def test_models_of_a_seed_differ_in_their_rotation_alone() -> None:
    batch = drawn(Sizes((2, 5), (2, 5)))
    models = {scheme: model_for(SMALL, scheme, 7) for scheme in (NONE, *neighbours.PLACED)}
    first = models[NONE].state_dict()
    for model in models.values():
        assert all(torch.equal(values, first[name]) for name, values in model.state_dict().items())
    with torch.no_grad():
        logits = [answers(model, batch, scheme) for scheme, model in models.items()]
        (bound,) = rounding(lambda: answers(models[NONE], batch, NONE), models[NONE].parameters())
    for i, found in enumerate(logits):
        assert all((found - other).abs().max() > 10 * bound for other in logits[:i])


def test_the_model_sees_distances_and_not_padding() -> None:
    batch = drawn(Sizes((2, 5), (2, 5)))
    model = model_for(SMALL, "rope-tie", 0)
    input_ids, asked = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.asked)
    positions = mmpos.place(batch.segments, "rope-tie")
    ids = torch.from_numpy(positions.padded()[0])

    def logits(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids, asked, ids).detach()

    placed = answers(model, batch, "rope-tie").detach()
    bound = rounding(lambda: logits(ids), model.parameters())
    assert_within(logits(ids + 1000), placed, bound)
    for others in (ids.flip(0), ids[..., torch.randperm(ids.shape[-1])]):  # rows and columns exchanged, columns mixed
        assert (logits(others) - placed).abs().max() > 10 * bound[0]
    alone = int(positions.lengths[0])
    short = model(input_ids[:1, :alone], asked[:1], ids[:, :1, :alone]).detach()
    assert_within(short, placed[:1], bound)


def test_training_moves_the_answers_and_repeats_exactly() -> None:
    found = [train(SMALL, "rope-tie-v2", seed) for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0].loss != found[2].loss
    tiny = Setup(Task(4, 5, 3), Shape(2, 2, 8, 16), Sizes((2, 2), (2, 2)), {}, 100.0, 100, 16, 0.02, images=10)
    assert train(tiny, "rope-tie", 1).loss < 1.06  # log 3 = 1.10 is a guess among the other patches


def test_the_script_runs_on_toy_sizes_and_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, found = tmp_path / "page.md", []
    for name, value in {"RESULTS": tmp_path, "PAGE": page, "PICTURE": tmp_path / "page.png"}.items():
        monkeypatch.setattr(neighbours, name, value)
    for _ in range(2):
        for path in tmp_path.glob(neighbours.KEPT):
            path.unlink()
        page.write_text("above\n<!-- neighbours -->\n<!-- /neighbours -->\nbelow\n", encoding="utf-8")
        neighbours.main("none,vrope", seeds=2, steps=2, jobs=1, quick=True, keep=True, only_tables=False)
        (path,) = tmp_path.glob(neighbours.KEPT)
        found.append(Results.from_json(path.read_text(encoding="utf-8")))
    assert found[0].outcomes == found[1].outcomes
    wanted = [(scheme, seed) for seed in range(2) for scheme in ("none", "vrope")]
    assert [(one.scheme, one.seed) for one in found[0].outcomes] == wanted
    assert found[0].setup["steps"] == 2
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    neighbours.main("vrope,rows", seeds=1, steps=2, jobs=1, quick=True, keep=True, only_tables=False)
    went_on = Results.from_json(path.read_text(encoding="utf-8")).outcomes
    assert went_on[:-1] == found[1].outcomes  # what was there is not trained again
    assert [(one.scheme, one.seed) for one in went_on[len(found[1].outcomes) :]] == [("rows", 0)]
    neighbours.main("vrope", seeds=1, steps=1, jobs=1, quick=True, keep=True, only_tables=False)
    others = Results.from_json(path.read_text(encoding="utf-8")).outcomes
    assert [(one.scheme, one.seed) for one in others] == [("vrope", 0)]  # those of other steps are not its own
    head, *_, end = page.read_text(encoding="utf-8").splitlines()
    assert (head, end) == ("above", "below")


def test_mistakes_are_named() -> None:
    with pytest.raises(InvalidInputError, match=r"--schemes: got 'rope', want some of none, flatten, rows, naive-2d, "):
        neighbours.named("mrope,rope")
    with pytest.raises(InvalidInputError, match=r"task.colours: got 63, want >= 64, the largest image's patches"):
        Setup(task=Task(colours=63))
    with pytest.raises(InvalidInputError, match=r"width: got 1 to 5, want at least 2, and the least first"):
        Sizes((2, 5), (1, 5))


def test_a_cell_is_the_mean_and_the_range_over_seeds() -> None:
    outcomes = [
        Outcome(scheme, seed, 0.5, {"inside": {"right": right, "below": below}}, 1.0)
        for scheme, seed, right, below in (("a", 0, 10, 20), ("b", 0, 1, 2), ("a", 1, 13, 20), ("a", 2, 16, 26))
    ]
    assert neighbours.table(Results("", {}, {}, {"inside": 12.5}, outcomes)) == [
        ["scheme", "seeds", "inside, right", "inside, below"],
        ["a", "3", "13 (10–16)", "22 (20–26)"],
        ["b", "1", "1 (1–1)", "2 (2–2)"],
        [neighbours.GUESS, "", "12", "12"],
    ]


def test_the_guess_knows_the_patches_and_no_places() -> None:
    two = replace(SMALL, trained=Sizes((2, 2), (2, 2)), outside={"strips": Sizes((2, 2), (3, 3))})
    assert neighbours.guess(two) == {"inside": 33.33, "strips": 20.0}


def test_what_the_page_says_holds_for_the_figures_that_are_kept() -> None:
    found = kept()[0]  # the one that is drawn, and spoken of
    spreads, tie = found.spreads(), {name for name in neighbours.PLACED if name.startswith("rope-tie")}
    several = {name for name in neighbours.PLACED if mmpos.SCHEMES[name]().axes > 1}
    assert set(neighbours.PLACED) - several == {"flatten", "v2pe"}
    for direction in DIRECTIONS:
        inside, larger, longer = (
            {scheme: cells[name, direction] for scheme, cells in spreads.items()} for name in found.guess
        )
        assert min(inside[name][0] for name in several) > 80
        assert min(several, key=lambda name: inside[name][1]) == "rope-tie-lcm"
        assert max(larger[name][2] for name in tie) < min(larger[name][0] for name in several - tie)
        assert larger["naive-2d"][0] > max(larger[name][2] for name in several - {"naive-2d"})
        assert longer["naive-2d"][0] > max(longer[name][2] for name in tie)
        assert max(tie, key=lambda name: longer[name][1]) == "rope-tie-v2"
    assert max(most - least for least, _, most in spreads["vrope"].values()) == printed("38")
    for name in ("flatten", "v2pe"):
        assert spreads[name]["inside", "right"][0] > 99
        assert spreads[name]["inside", "below"][2] < 20
        assert spreads[name]["longer", "right"][0] > max(spreads[other]["longer", "right"][1] for other in several)


def test_the_page_quotes_the_figures_that_are_kept() -> None:
    page = neighbours.PAGE.read_text(encoding="utf-8")
    assert "<!-- neighbours -->" in page
    assert neighbours.filled_in(page) == page
    assert all(found.setup == Setup().to_dict() for found in kept())
