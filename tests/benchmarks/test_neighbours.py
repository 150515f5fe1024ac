"""The experiment: its questions, the positions in its model, reproducible training, and the page's statements."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import neighbours
import numpy as np
import pytest
import torch
from neighbours import COLOURS, DIRECTIONS, FILLER_ID, GUESS, NONE, PLACED, QUESTIONS, Quiz, Sizes, Transformer
from pages import kept_figures
from tolerance import assert_within, printed, rounding

import mmpos

SQUARES: Sizes = ((2, 5), (2, 5))


def drawn(sizes: Sizes = SQUARES, count: int = 40) -> Quiz:
    return neighbours.draw(sizes, count, np.random.default_rng(0))


def images(quiz: Quiz) -> list[tuple[int, list[list[int]]]]:
    """Return the number of filler words before each image, and the image's colours row by row."""
    parsed = []
    for d, ids in enumerate(quiz.input_ids.tolist()):
        text, grid, _ = range(*quiz.segments.segment_offsets[d : d + 2])
        before = int(quiz.segments.extents[:, text].prod())
        _, height, width = quiz.segments.extents[:, grid].tolist()
        assert ids[:before] == [FILLER_ID] * before
        parsed.append((before, [ids[before + width * row :][:width] for row in range(height)]))
    return parsed


@pytest.mark.parametrize("sizes", [SQUARES, ((2, 3), (9, 14))])
def test_answers_are_the_colours_of_the_neighbours_to_the_right_and_below(sizes: Sizes) -> None:
    quiz = drawn(sizes)
    for d, (before, rows) in enumerate(images(quiz)):
        cells = [colour for row in rows for colour in row]
        assert len(set(cells)) == len(cells) == quiz.patches[d]
        for i in range(QUESTIONS):
            column = before + quiz.patches[d] + 2 * i
            assert quiz.asked[d, i] == column + 1
            direction, colour = quiz.input_ids[d, column : column + 2].tolist()
            assert direction == COLOURS + quiz.directions[d, i]
            step = {"right": 1, "below": len(rows[0])}[DIRECTIONS[quiz.directions[d, i]]]
            at = cells.index(colour)
            assert quiz.answers[d, i] == cells[at + step]
            assert step > 1 or (at + 1) % len(rows[0])


def test_sizes_questions_and_filler_cover_all_values() -> None:
    quiz = drawn(((2, 3), (4, 5)), 200)
    shapes = {(len(rows), len(rows[0])) for _, rows in images(quiz)}
    assert shapes == {(h, w) for a, b in ((2, 4), (2, 5), (3, 4), (3, 5)) for h, w in ((a, b), (b, a))}
    assert {before for before, _ in images(quiz)} == {1, 2, 3, 4}
    assert set(quiz.directions.flat) == {0, 1}


def test_every_distinct_scheme_for_text_and_images_is_trained_once() -> None:
    segments = drawn().segments

    def ids(scheme: str) -> tuple[object, ...]:
        dense = mmpos.place(segments, scheme).dense()
        return dense.shape, dense.astype(np.float64).tobytes()

    trained = {ids(scheme) for scheme in PLACED}
    assert len(trained) == len(PLACED)
    # Excluded: schemes that number images or count markers for a single model, and schemes for generation models.
    excluded = {"xd-rope", "mrope-canvas", "qwen-image-2.1", "bagel"}
    excluded |= {name for name, scheme in mmpos.SCHEMES.items() if issubclass(scheme, mmpos.schemes.LatentScheme)}
    assert {ids(name) for name in mmpos.SCHEMES.keys() - excluded if mmpos.SCHEMES[name].text} == trained


def test_models_with_the_same_seed_differ_only_in_their_rotation() -> None:
    quiz, plain = drawn(), Transformer(NONE, 7)
    models = [plain, *(Transformer(scheme, 7) for scheme in PLACED)]
    first = plain.state_dict()
    for model in models:
        assert all(torch.equal(values, first[name]) for name, values in model.state_dict().items())
    with torch.no_grad():
        logits = [model(quiz) for model in models]
        (bound,) = rounding(lambda: plain(quiz), plain.parameters())
    for i, one in enumerate(logits):
        assert all((one - other).abs().max() > 10 * bound for other in logits[:i])


def test_the_model_depends_on_distances_but_not_on_padding() -> None:
    quiz, model = drawn(), Transformer("rope-tie", 0)
    ids = torch.from_numpy(mmpos.place(quiz.segments, "rope-tie").padded()[0])
    with torch.no_grad():
        placed, moved = model(quiz), model(quiz, ids + 1000)
        bound = rounding(lambda: model(quiz), model.parameters())
        assert_within(moved, placed, bound)
        for others in (ids.flip(0), ids[..., torch.randperm(ids.shape[-1])]):  # axes swapped, columns permuted
            assert (model(quiz, others) - placed).abs().max() > 10 * bound[0]
        # Without longer documents beside it, the first document needs no padding.
        first = replace(quiz, **{name: getattr(quiz, name)[:1] for name in ("input_ids", "asked")})
        short = replace(first, input_ids=first.input_ids[:, : quiz.segments.lengths[:3].sum()])
        assert_within(model(short, ids[:, :1, : short.input_ids.shape[1]]), placed[:1], bound)


def test_training_improves_answers_and_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again, other = (neighbours.train("rope-tie-v2", seed, 3, 4) for seed in (1, 1, 2))
    assert one | {"seconds": 0} == again | {"seconds": 0}
    assert one["loss"] != other["loss"]
    tiny = {"COLOURS": 4, "FILLER_ID": 6, "SETS": {"inside": ((2, 2), (2, 2))}}
    for name, value in tiny.items():
        monkeypatch.setattr(neighbours, name, value)
    assert neighbours.train("rope-tie", 1, 60, 10)["loss"] < 0.9  # guessing among the other patches gives log 3 = 1.10


def test_an_interrupted_run_continues_with_the_missing_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neighbours.RESULTS", tmp_path)
    monkeypatch.setattr("pages.RESULTS", tmp_path)
    monkeypatch.setattr("neighbours.PICTURE", tmp_path / "page.png")
    monkeypatch.setattr("neighbours.ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    want: list[tuple[str, int]] = []
    for schemes, seeds in ((["vrope"], 1), (["none", "vrope"], 2)):
        neighbours.main(["--json", "--seeds", str(seeds), "--schemes", *schemes], 2, 4)
        want += [(name, seed) for seed in range(seeds) for name in schemes if (name, seed) not in want]
        (kept,) = kept_figures("neighbours-*.json")
        assert [(one["scheme"], one["seed"]) for one in kept["outcomes"]] == want
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_a_cell_shows_the_mean_and_the_range_over_seeds() -> None:
    outcomes = [
        {"scheme": scheme, "seed": seed, "accuracy": {"inside, right": right, "inside, below": below}}
        for scheme, seed, right, below in (("a", 0, 10, 20), ("b", 0, 1, 2), ("a", 1, 13, 20), ("a", 2, 16, 26))
    ]
    assert neighbours.table({"guess": {"inside": 12.5}, "outcomes": outcomes}) == [
        ["scheme", "seeds", "inside, right", "inside, below"],
        ["a", "3", "13 (10–16)", "22 (20–26)"],
        ["b", "1", "1 (1–1)", "2 (2–2)"],
        [GUESS, "", "12", "12"],
    ]


def test_the_guess_chooses_among_the_other_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "SETS", {"squares": ((2, 2), (2, 2)), "strips": ((2, 2), (3, 3))})
    assert neighbours.guess() == {"squares": 33.33, "strips": 20.0}


def test_recorded_figures_support_the_statements_on_the_page() -> None:
    kept = kept_figures("neighbours-*.json")[0]  # the figures that the page plots and discusses
    columns = list(kept["outcomes"][0]["accuracy"])
    accuracy = {scheme: dict(zip(columns, p.T, strict=True)) for scheme, p in neighbours.percents(kept).items()}
    tie = {name for name in PLACED if name.startswith("rope-tie")}
    several = {name for name in PLACED if mmpos.SCHEMES[name]().axes > 1}
    assert set(PLACED) - several == {"flatten", "v2pe"}
    for direction in DIRECTIONS:
        inside, larger, longer = (
            {scheme: cells[f"{name}, {direction}"] for scheme, cells in accuracy.items()} for name in kept["guess"]
        )
        assert min(inside[name].min() for name in several) > 80
        assert min(several, key=lambda name: inside[name].mean()) == "rope-tie-lcm"
        assert max(larger[name].max() for name in tie) < min(larger[name].min() for name in several - tie)
        assert larger["naive-2d"].min() > max(larger[name].max() for name in several - {"naive-2d"})
        assert longer["naive-2d"].min() > max(longer[name].max() for name in tie)
        assert max(tie, key=lambda name: longer[name].mean()) == "rope-tie-v2"
    assert max(np.ptp(cells) for cells in accuracy["vrope"].values()) == printed("38")
    for name in ("flatten", "v2pe"):
        assert accuracy[name]["inside, right"].min() > 99
        assert accuracy[name]["inside, below"].max() < 20
        others = max(accuracy[other]["longer, right"].mean() for other in several)
        assert accuracy[name]["longer, right"].min() > others
