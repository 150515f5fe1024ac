"""What a small transformer makes of each scheme: which colour is right of, or below, the patch of colour c?

python benchmarks/neighbours.py                                       every scheme, five seeds, two at a time
python benchmarks/neighbours.py --json                                the same, kept in results/ and on the page
python benchmarks/neighbours.py --schemes rope-tie,mrope --seeds 3    some of it
python benchmarks/neighbours.py --tables                              only table and picture, from the figures there

With --json, what is kept already of the same setup is not trained again, so that a run which was stopped goes on
where it was; figures of another setup are replaced. After a change to the code, delete the file first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from neighbours_model import Shape
from neighbours_page import PAGE, PICTURE, RESULTS, Found, fill_in, guess, picture, shown, table
from neighbours_task import Task
from neighbours_training import NONE, Outcome, Setup, train

from mmpos.errors import InvalidInputError, MmposError
from mmpos.support.files import write_text
from mmpos_bench.machine import stamp

PLACED = (
    "flatten",
    "rows",
    "naive-2d",
    "rope-tie",
    "rope-tie-fractional",
    "rope-tie-v2",
    "rope-tie-lcm",
    "mrope",
    "mrope-interleave-reset",
    "v2pe",
    "videorope",
    "vrope",
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
    """What a file holds of this setup; another one's figures are not ours to go on with."""
    if not path.exists():
        return []
    found = Found.from_json(path.read_text(encoding="utf-8"))
    return found.outcomes if found.setup == setup.to_dict() else []


def missing(found: Found, schemes: Sequence[str], seeds: int) -> list[tuple[str, int]]:
    """Schemes and seeds without an outcome, a whole seed before the next."""
    known = {(outcome.scheme, outcome.seed) for outcome in found.outcomes}
    return [run for seed in range(seeds) for scheme in schemes if (run := (scheme, seed)) not in known]


def named(schemes: str) -> list[str]:
    """The schemes of a list, or all."""
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
        found = Found(command, asdict(machine), setup.to_dict(), guess(setup), before)
        for outcome in experiment(setup, missing(found, named(schemes), seeds), jobs):
            print(f"{outcome.scheme}, seed {outcome.seed}: {outcome.seconds} s", file=sys.stderr, flush=True)
            found.outcomes.append(outcome)
            if keep:
                write_text(path, found.to_json())
        shown(table(found))
    if keep or only_tables:
        write_text(PAGE, fill_in(PAGE.read_text(encoding="utf-8")))
        picture(PICTURE)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MmposError as error:
        raise SystemExit(f"neighbours: error: {error}") from None
