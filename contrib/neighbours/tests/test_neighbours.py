"""The experiment: its questions, the positions in its model, and reproducible training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from mmpos_neighbours import experiment
from mmpos_neighbours.experiment import Quiz, Transformer

import mmpos

ROUNDING = 2**-24 * experiment.WIDTH * experiment.HIDDEN  # of logits, which are sums over width and hidden units


def drawn(sizes: str = "inside") -> Quiz:
    return experiment.draw(experiment.SETS[sizes], 40, np.random.default_rng(0))


def images(quiz: Quiz) -> list[tuple[int, list[list[int]]]]:
    """Return the number of filler words before each image, and the image's colours row by row."""
    parsed = []
    for d, ids in enumerate(quiz.input_ids.tolist()):
        text, grid, _ = range(*quiz.segments.segment_offsets[d : d + 2])
        before = int(quiz.segments.extents[:, text].prod())
        _, height, width = quiz.segments.extents[:, grid].tolist()
        assert ids[:before] == [experiment.FILLER_ID] * before
        parsed.append((before, [ids[before + width * row :][:width] for row in range(height)]))
    return parsed


@pytest.mark.parametrize("sizes", experiment.SETS)
def test_answers_are_the_colours_of_the_neighbours_to_the_right_and_below(sizes: str) -> None:
    quiz = drawn(sizes)
    for d, (before, rows) in enumerate(images(quiz)):
        cells = [colour for row in rows for colour in row]
        assert len(set(cells)) == len(cells) == quiz.patches[d]
        for i in range(experiment.QUESTIONS):
            column = before + quiz.patches[d] + 2 * i
            direction, colour = quiz.input_ids[d, column : column + 2].tolist()
            assert (quiz.asked[d, i], direction) == (column + 1, experiment.COLOURS + quiz.directions[d, i])
            step = {"right": 1, "below": len(rows[0])}[experiment.DIRECTIONS[quiz.directions[d, i]]]
            at = cells.index(colour)
            assert quiz.answers[d, i] == cells[at + step]
            assert step > 1 or (at + 1) % len(rows[0])


def test_every_distinct_scheme_for_text_and_images_is_trained_once() -> None:
    segments = drawn().segments

    def ids(scheme: str) -> tuple[object, ...]:
        dense = mmpos.place(segments, scheme).dense()
        return dense.shape, dense.astype(np.float64).tobytes()

    trained = {ids(scheme) for scheme in experiment.PLACED}
    assert len(trained) == len(experiment.PLACED)
    # Excluded: schemes that number images or count markers for a single model, and schemes for generation models.
    excluded = {"xd-rope", "mrope-canvas", "qwen-image-2.1", "bagel"}
    excluded |= {name for name, scheme in mmpos.SCHEMES.items() if issubclass(scheme, mmpos.schemes.LatentScheme)}
    assert {ids(name) for name in mmpos.SCHEMES.keys() - excluded if mmpos.SCHEMES[name].text} == trained


def test_models_with_the_same_seed_differ_only_in_their_rotation() -> None:
    quiz, plain = drawn(), Transformer(experiment.NONE, 7)
    models = [plain, *(Transformer(scheme, 7) for scheme in experiment.PLACED)]
    first = plain.state_dict()
    for model in models:
        assert all(torch.equal(values, first[name]) for name, values in model.state_dict().items())
    with torch.no_grad():
        logits = [model(quiz) for model in models]
    for i, one in enumerate(logits):
        assert all((one - other).abs().max() > 10 * ROUNDING for other in logits[:i])


def test_the_model_depends_on_distances_but_not_on_padding() -> None:
    quiz, model = drawn(), Transformer("rope-tie", 0)
    ids = torch.from_numpy(mmpos.place(quiz.segments, "rope-tie").padded()[0])
    with torch.no_grad():
        placed, moved = model(quiz), model(quiz, ids + 1000)
        assert (moved - placed).abs().max() < ROUNDING
        for others in (ids.flip(0), ids[..., torch.randperm(ids.shape[-1])]):  # axes swapped, columns permuted
            assert (model(quiz, others) - placed).abs().max() > 10 * ROUNDING
        # Without longer documents beside it, the first document needs no padding.
        first = replace(quiz, **{name: getattr(quiz, name)[:1] for name in ("input_ids", "asked")})
        short = replace(first, input_ids=first.input_ids[:, : quiz.segments.lengths[:3].sum()])
        assert (model(short, ids[:, :1, : short.input_ids.shape[1]]) - placed[:1]).abs().max() < ROUNDING


def test_training_improves_answers_and_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    one, again, other = (experiment.train("rope-tie-v2", seed, 3, 4) for seed in (1, 1, 2))
    assert one | {"seconds": 0} == again | {"seconds": 0}
    assert one["loss"] != other["loss"]
    for name, value in {"COLOURS": 4, "FILLER_ID": 6, "SETS": {"inside": ((2, 2), (2, 2))}}.items():
        monkeypatch.setattr(experiment, name, value)
    assert experiment.train("rope-tie", 1, 60, 10)["loss"] < 0.9  # guessing among the other patches gives log 3 = 1.10


def test_the_command_prints_each_scheme(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(experiment, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    experiment.main(["--seeds", "2", "--schemes", "none", "vrope"], 2, 4)
    rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["| scheme", "| ---", "| none", "| vrope", f"| {experiment.GUESS}"]


def test_a_cell_shows_the_mean_and_the_range_over_seeds() -> None:
    accuracies = [{"inside, right": right, "inside, below": below} for right, below in ((10, 20), (13, 20), (16, 26))]
    outcomes = [{"scheme": "a", "accuracy": accuracy} for accuracy in accuracies]
    assert experiment.table(outcomes, {"inside": 12.5}).splitlines() == [
        "| scheme | seeds | inside, right | inside, below |",
        "| --- | ---: | ---: | ---: |",
        "| a | 3 | 13 (10–16) | 22 (20–26) |",
        f"| {experiment.GUESS} |  | 12 | 12 |",
    ]


def test_the_guess_chooses_among_the_other_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "SETS", {"squares": ((2, 2), (2, 2)), "strips": ((2, 2), (3, 3))})
    assert experiment.guess() == {"squares": 33.33, "strips": 20.0}
