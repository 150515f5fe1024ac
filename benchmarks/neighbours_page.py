"""What the experiment found, as a file, as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from neighbours_task import DIRECTIONS
from neighbours_training import Outcome, Setup
from rich.console import Console

from mmpos.analysis.plot.canvas import COLOURS, FAINT, INK, canvas
from mmpos.cli import report

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KEPT = "neighbours-*.json"
PAGE = HERE.parent / "docs" / "experiment.md"
PICTURE = PAGE.with_suffix(".png")
BEGIN, END = "<!-- neighbours -->\n", "<!-- /neighbours -->"
GUESS = "(a guess among the other patches)"


@dataclass(frozen=True)
class Found:
    """An experiment, as it is kept.

    Args:
        command: that made it.
        machine: where, as a dictionary.
        setup: of all its trainings, as a dictionary.
        guess: percent that a guess among the other patches of the image gets right, by set.
        outcomes: of the trainings.
    """

    command: str
    machine: Mapping[str, Any]
    setup: Mapping[str, Any]
    guess: Mapping[str, float]
    outcomes: list[Outcome]

    @classmethod
    def from_json(cls, text: str) -> Found:
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "outcomes": [Outcome(**one) for one in values["outcomes"]]})

    def to_json(self) -> str:
        """A line for every outcome."""
        head = {name: getattr(self, name) for name in ("command", "machine", "setup", "guess")}
        lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
        rows = ",\n  ".join(json.dumps(asdict(one)) for one in self.outcomes)
        return "{" + ",\n ".join([*lines, f'"outcomes": [\n  {rows}\n ]']) + "}\n"

    def spreads(self) -> dict[str, dict[tuple[str, str], tuple[float, float, float]]]:
        """Least, mean and most percent over the seeds, by scheme, then by set and direction."""
        found = {}
        for scheme in dict.fromkeys(one.scheme for one in self.outcomes):
            of_scheme = [one.accuracy for one in self.outcomes if one.scheme == scheme]
            found[scheme] = {
                (name, direction): (min(seen), sum(seen) / len(seen), max(seen))
                for name in self.guess
                for direction in DIRECTIONS
                for seen in [[accuracy[name][direction] for accuracy in of_scheme]]
            }
        return found


def guess(setup: Setup) -> dict[str, float]:
    """Percent of right answers, by set, of one who knows the patches of an image but not where they are."""
    return {name: round(100 * float(np.mean(1 / (batch.patches - 1))), 2) for name, batch in setup.held_out().items()}


def table(found: Found) -> list[list[str]]:
    """Head and rows: mean, and least to most over the seeds, in percent."""
    head = ["scheme", "seeds", *(f"{name}, {direction}" for name in found.guess for direction in DIRECTIONS)]
    seeds = {scheme: sum(one.scheme == scheme for one in found.outcomes) for scheme in found.spreads()}
    rows = [
        [scheme, str(seeds[scheme]), *(f"{mean:.0f} ({least:.0f}–{most:.0f})" for least, mean, most in cells.values())]
        for scheme, cells in found.spreads().items()
    ]
    guesses = [f"{found.guess[name]:.0f}" for name in found.guess for _ in DIRECTIONS]
    return [head, *rows, [GUESS, "", *guesses]]


def fill_in(page: str) -> str:
    """The page with the tables of all kept figures between its marks."""
    begin, _, rest = page.partition(BEGIN)
    _, _, end = rest.partition(END)
    texts = []
    for path in sorted(RESULTS.glob(KEPT)):
        found = Found.from_json(path.read_text(encoding="utf-8"))
        texts.append(f"{found.machine['cpu']}, {found.machine['cores']} cores, `{found.command}`:\n")
        head, *rows = table(found)
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        texts.append("".join(f"| {' | '.join(cells)} |\n" for cells in lines))
    return f"{begin}{BEGIN}\n" + "\n".join(texts) + f"\n{END}{end}"


def shown(rows: list[list[str]]) -> None:
    """Print a table, as wide as it is."""
    head, *body = rows
    printed = report.new_table(*head, right=head[1:])
    for cells in body:
        printed.add_row(*cells)
    report.show(Console(width=200, highlight=False), printed)


def picture(path: Path) -> None:
    """Draw the first kept file, a panel per set: means as points, least to most as lines, a guess as a dashed line."""
    found = Found.from_json(next(iter(sorted(RESULTS.glob(KEPT)))).read_text(encoding="utf-8"))
    spreads = found.spreads()
    with canvas(path, 8.0, 0.26 * len(spreads) + 1.3) as figure:
        panels = figure.subplots(1, len(found.guess), sharey=True)
        for panel, (name, guessed) in zip(panels, found.guess.items(), strict=True):
            for i, (direction, mark) in enumerate(zip(DIRECTIONS, "os", strict=True)):
                least, mean, most = zip(*(cells[name, direction] for cells in spreads.values()), strict=True)
                rows = np.arange(len(spreads)) + (i - 0.5) * 0.36
                panel.hlines(rows, least, most, color=COLOURS[i], linewidth=2)
                panel.plot(mean, rows, mark, color=COLOURS[i], markersize=5, label=direction)
            panel.axvline(guessed, color=FAINT, linestyle="--", linewidth=1, label="a guess")
            _frame(panel, f"{name} the trained sizes" if name == "inside" else f"{name} images", list(spreads))
        panels[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False, fontsize=9)
        figure.subplots_adjust(left=0.23, right=0.985, top=0.93, bottom=0.18, wspace=0.08)


def _frame(panel: Any, title: str, schemes: list[str]) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.set_xlim(-4, 104)
    panel.set_xticks(range(0, 101, 25))
    panel.set_ylim(len(schemes) - 0.4, -0.6)
    panel.set_yticks(range(len(schemes)), schemes)
    panel.set_xlabel("right answers, %")
    panel.tick_params(length=0, colors=INK)
    panel.grid(axis="x", color="#e8e8e8", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[:].set_color("#bbbbbb")
