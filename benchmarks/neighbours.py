"""Train a small transformer under each scheme, and ask it: which colour is right of, or below, the patch of colour c?

python benchmarks/neighbours.py                                       every scheme, five seeds, two at a time
python benchmarks/neighbours.py --json                                the same, kept in results/ and on the page
python benchmarks/neighbours.py --schemes rope-tie,mrope --seeds 3    some of it
python benchmarks/neighbours.py --tables                              only table and picture, from the figures there

With --json, what is kept already of the same setup is not trained again, so that a run which was stopped goes on
where it was; figures of another setup are replaced. After a change to the code, delete the file first.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from neighbours_training import DIRECTIONS, NONE, Outcome, Setup, Shape, Task, train
from pages import RESULTS, Rows, fill_in, of_machine, show

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, canvas, quiet_axes
from mmpos.errors import InvalidInputError, MmposError
from mmpos.support.files import write_text
from mmpos_bench.machine import stamp
from mmpos_bench.results import json_with_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEPT = "neighbours-*.json"
PAGE = Path(__file__).parents[1] / "docs" / "experiment.md"
PICTURE = PAGE.with_suffix(".png")
GUESS = "(a guess among the other patches)"


@dataclass(frozen=True)
class Results:
    """An experiment, as it is kept."""

    command: str  # that made it
    machine: Mapping[str, Any]
    setup: Mapping[str, Any]  # of all its trainings
    guess: Mapping[str, float]  # percent that a guess among the other patches of the image gets correct, by set
    outcomes: list[Outcome]  # of the trainings

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read the text of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "outcomes": [Outcome(**one) for one in values["outcomes"]]})

    def to_json(self) -> str:
        """Write a line for every outcome."""
        head = {name: getattr(self, name) for name in ("command", "machine", "setup", "guess")}
        return json_with_rows(head, "outcomes", map(asdict, self.outcomes)) + "\n"

    def spreads(self) -> dict[str, dict[tuple[str, str], tuple[float, float, float]]]:
        """Find least, mean and most percent over the seeds, by scheme, then by set and direction."""
        spreads = {}
        for scheme in dict.fromkeys(one.scheme for one in self.outcomes):
            of_scheme = [one.accuracy for one in self.outcomes if one.scheme == scheme]
            spreads[scheme] = {
                # Every Python rounds this alike; sum is compensated from 3.12 on.
                (name, direction): (min(seen), math.fsum(seen) / len(seen), max(seen))
                for name in self.guess
                for direction in DIRECTIONS
                for seen in [[accuracy[name][direction] for accuracy in of_scheme]]
            }
        return spreads


def guess(setup: Setup) -> dict[str, float]:
    """Compute percent of correct answers, by set, of one who knows the patches of an image but not where they are."""
    return {name: round(100 * float(np.mean(1 / (batch.patches - 1))), 2) for name, batch in setup.held_out().items()}


def table(results: Results) -> Rows:
    """Make head and rows: mean, and least to most over the seeds, in percent."""
    head = ["scheme", "seeds", *(f"{name}, {direction}" for name in results.guess for direction in DIRECTIONS)]
    seeds = {scheme: sum(one.scheme == scheme for one in results.outcomes) for scheme in results.spreads()}
    rows = [
        [scheme, str(seeds[scheme]), *(f"{mean:.0f} ({least:.0f}–{most:.0f})" for least, mean, most in cells.values())]
        for scheme, cells in results.spreads().items()
    ]
    guesses = [f"{results.guess[name]:.0f}" for name in results.guess for _ in DIRECTIONS]
    return [head, *rows, [GUESS, "", *guesses]]


def quoted(results: Results) -> str:
    """Write the table of a file in results/."""
    return of_machine(results.machine, results.command, table(results))


def filled_in(page: str) -> str:
    """Write the tables of all kept figures into the page."""
    return fill_in(page, "neighbours", lambda _: "".join(map(quoted, kept_results())) + "\n")


def kept_results() -> list[Results]:
    """Read the figures of every machine."""
    return [Results.from_json(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(KEPT))]


def picture(path: Path) -> None:
    """Draw the first kept file, a panel per set: means as points, least to most as lines, a guess as a dashed line."""
    results = kept_results()[0]
    spreads = results.spreads()
    with canvas(path, 8.0, 0.26 * len(spreads) + 1.3) as figure:
        panels = figure.subplots(1, len(results.guess), sharey=True)
        for panel, (name, guessed) in zip(panels, results.guess.items(), strict=True):
            for i, (direction, mark) in enumerate(zip(DIRECTIONS, "os", strict=True)):
                least, mean, most = zip(*(cells[name, direction] for cells in spreads.values()), strict=True)
                rows = np.arange(len(spreads)) + (i - 0.5) * 0.36
                panel.hlines(rows, least, most, color=COLOURS[i], linewidth=2)
                panel.plot(mean, rows, mark, color=COLOURS[i], markersize=5, label=direction)
            panel.axvline(guessed, color=FAINT, linestyle="--", linewidth=1, label="a guess")
            _frame(panel, f"{name} the trained sizes" if name == "inside" else f"{name} images", list(spreads))
        panels[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False, fontsize=9)
        figure.subplots_adjust(left=0.23, right=0.985, top=0.93, bottom=0.18, wspace=0.08)


def _frame(panel: Axes, title: str, schemes: list[str]) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.set_xlim(-4, 104)
    panel.set_xticks(range(0, 101, 25))
    panel.set_ylim(len(schemes) - 0.4, -0.6)
    panel.set_yticks(range(len(schemes)), schemes)
    panel.set_xlabel("correct answers, %")
    quiet_axes(panel)
    panel.tick_params(colors=INK)
    panel.grid(visible=False, axis="y")


PLACED = (
    *("flatten", "rows", "naive-2d", "rope-tie", "rope-tie-fractional", "rope-tie-v2", "rope-tie-lcm", "mrope"),
    *("mrope-interleave-reset", "v2pe", "videorope", "vrope"),
)
"""The schemes that differ on text and single images, in the order of the table."""

QUICK = Setup(task=Task(64, 2, 2), shape=Shape(1, 1, 8, 16), steps=3, batch=4, images=10)
"""Toy sizes, whose figures mean nothing."""


def experiment(setup: Setup, runs: Sequence[tuple[str, int]], jobs: int) -> Iterator[Outcome]:
    """Train with the scheme and seed of every run, in their order."""
    if jobs == 1:
        yield from (train(setup, *run) for run in runs)
        return
    # Fresh processes: the threads of this one do not survive a fork.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(train, setup), *zip(*runs, strict=True))


def kept_outcomes(path: Path, setup: Setup) -> list[Outcome]:
    """Read the outcomes of this setup from a file; figures of another setup are left out."""
    results = Results.from_json(path.read_text(encoding="utf-8")) if path.exists() else None
    return results.outcomes if results is not None and results.setup == setup.to_dict() else []


def missing(results: Results, schemes: Sequence[str], seeds: int) -> list[tuple[str, int]]:
    """List schemes and seeds without an outcome, a whole seed before the next."""
    known = {(outcome.scheme, outcome.seed) for outcome in results.outcomes}
    return [run for seed in range(seeds) for scheme in schemes if (run := (scheme, seed)) not in known]


def named(schemes: str) -> list[str]:
    """Read the schemes of a list, or all."""
    known = (NONE, *PLACED)
    names = schemes.split(",") if schemes else list(known)
    for name in names:
        if name not in known:
            raise InvalidInputError(f"--schemes: got {name!r}, want some of {', '.join(known)}")
    return names


def main(
    schemes: Annotated[str, typer.Option(help="Names, with commas between; all if none is given.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How often each is trained.")] = 5,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time, each with one thread.")] = 2,
    quick: Annotated[bool, typer.Option(help="Toy sizes: the figures mean nothing.")] = False,
    keep: Annotated[bool, typer.Option("--json", help="Keep the figures in results/, and fill in the page.")] = False,
    only_tables: Annotated[bool, typer.Option("--tables", help="Only fill in the page.")] = False,
) -> None:
    """Train, show, and keep if told so."""
    if not only_tables:
        setup = QUICK if quick else Setup()
        setup = setup if steps is None else replace(setup, steps=steps)
        machine, command = stamp("default"), " ".join(["benchmarks/neighbours.py", *sys.argv[1:]])
        path = RESULTS / f"neighbours-{machine.name}.json"
        before = kept_outcomes(path, setup) if keep else []
        results = Results(command, asdict(machine), setup.to_dict(), guess(setup), before)
        for outcome in experiment(setup, missing(results, named(schemes), seeds), jobs):
            print(f"{outcome.scheme}, seed {outcome.seed}: {outcome.seconds} s", file=sys.stderr, flush=True)
            results.outcomes.append(outcome)
            if keep:
                write_text(path, results.to_json())
        show(table(results))
    if keep or only_tables:
        write_text(PAGE, filled_in(PAGE.read_text(encoding="utf-8")))
        picture(PICTURE)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MmposError as error:
        raise SystemExit(f"neighbours: error: {error}") from None
