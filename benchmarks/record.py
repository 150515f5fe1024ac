"""Run every suite on this machine, keep the figures in results/, and bring the tables that quote them up to date.

python benchmarks/record.py                          every suite with every peer, with both mallocs
python benchmarks/record.py images service:tuned     these again, beside the figures that are there
python benchmarks/record.py --tables                 only the tables, from the figures that are there; those of
                                                     properties are measured, which takes no time
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import endurance
import model_tables
import neighbours
from pages import RESULTS, fill_in, quoted

from mmpos.analysis.compare import Matrix, measure, measure_encodings
from mmpos.schemes import SCHEMES, LatentScheme
from mmpos.support.files import write_text
from mmpos_bench.machine import MALLOCS
from mmpos_bench.results import SuiteReport, from_json, to_json, to_markdown
from mmpos_bench.suites import SUITES

ROOT = Path(__file__).parents[1]
QUOTING = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
"""The pages that may quote results."""


schemes, encodings = cache(measure), cache(measure_encodings)
"""The properties of all forms of all schemes where grids follow text, and of all encodings."""


@cache
def latent_schemes() -> Matrix:
    """Measure the schemes of models that generate."""
    names = [name for name, scheme in SCHEMES.items() if issubclass(scheme, LatentScheme)]
    return measure(names).part(names)


def definitions(matrix: Matrix) -> str:
    """Write a line for every property: its definition."""
    return "".join(f"- **{each.title}**: {each.definition}\n" for each in matrix.properties)


def counterexamples(matrix: Matrix) -> str:
    """Write a line for everything that does not hold: where it fails."""
    wrong = ((name, each) for name, each, _ in matrix.reasons if matrix[name, each.name].value is False)
    return "".join(f"- `{name}`, {each.title}: {matrix[name, each.name].why}\n" for name, each in wrong)


QUOTES: Mapping[str, Callable[[], str]] = {
    "schemes": lambda: schemes().part(SCHEMES).to_markdown(),
    "schemes with three axes": lambda: schemes().part(set(schemes().rows) - set(SCHEMES)).to_markdown(),
    "schemes of models that generate": lambda: latent_schemes().to_markdown(),
    "encodings": lambda: encodings().to_markdown(),
    "properties of schemes": lambda: definitions(schemes()),
    "properties of encodings": lambda: definitions(encodings()),
    "counterexamples of schemes": lambda: counterexamples(schemes()),
    "counterexamples of encodings": lambda: counterexamples(encodings()),
}
"""The quotes of pages, by name."""


def run_suites(wanted: Sequence[tuple[str, str]]) -> list[SuiteReport]:
    """Run suites with mallocs, each in a process of its own: what one leaves behind would help the next."""
    reports: list[SuiteReport] = []
    for suite, malloc in wanted:
        print(f"{suite}, malloc {malloc}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "mmpos", "bench", suite, "--peers", "--malloc", malloc, "--json", "-"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        reports += from_json(done.stdout)
    return reports


def keep(reports: Sequence[SuiteReport]) -> Path:
    """Write reports into the file of this machine, in the place of those of the same suite and malloc."""
    path = RESULTS / f"{reports[-1].machine.name}.json"
    known = from_json(path.read_text(encoding="utf-8")) if path.exists() else ()
    merged = {(report.suite, report.machine.malloc): report for report in (*known, *reports)}
    order = [(suite, malloc) for suite in SUITES for malloc in MALLOCS]
    write_text(path, to_json([merged[name] for name in order if name in merged]))
    return path


def named(run: str) -> list[tuple[str, str]]:
    """Read SUITE or SUITE:MALLOC: the suites and mallocs to run."""
    suite, _, malloc = run.partition(":")
    if suite not in SUITES or malloc not in ("", *MALLOCS):
        raise argparse.ArgumentTypeError(f"got {run!r}, want one of {', '.join(SUITES)}, and :default or :tuned")
    return [(suite, malloc)] if malloc else [(suite, name) for name in MALLOCS]


def quoted_table(name: str) -> str:
    """Write the table of "machine; suite; malloc; group"."""
    machine, suite, malloc, group = name.split("; ", 3)
    path = RESULTS / f"{machine}.json"
    for report in from_json(path.read_text(encoding="utf-8")) if path.exists() else ():
        if (report.suite, report.machine.malloc) == (suite, malloc) and report.group(group):
            return to_markdown(report.group(group))
    raise SystemExit(f"{name}: got no such figures in {RESULTS}, want them measured")


def named_quote(quotes: Mapping[str, Callable[[], str]], name: str) -> str:
    """Write what a page quotes by a name."""
    if name not in quotes:
        raise SystemExit(f"quote: got {name!r}, want one of {', '.join(quotes)}")
    return quotes[name]()


MARKS: Mapping[str, Callable[[str], str]] = {
    "bench": quoted_table,
    "compare": partial(named_quote, QUOTES),
    "models": partial(named_quote, model_tables.QUOTES),
    "endurance": lambda _: quoted("*.endurance.json", endurance.tables),
    "neighbours": lambda _: quoted("neighbours-*.json", lambda kept: [neighbours.table(kept)]),
}
"""The marks of pages, and what writes the text between them."""


def filled_in(page: str) -> str:
    """Make everything anew that a page quotes.

    Raises:
        SystemExit: a table of figures that are not there, or properties or model types that are not known.
    """
    for mark, write in MARKS.items():
        page = fill_in(page, mark, write)
    return page


def main() -> None:
    """Measure unless told not to, and fill in the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=named, help="suites, or SUITE:MALLOC; all if none is named")
    parser.add_argument("--tables", action="store_true", help="only make the tables anew")
    options = parser.parse_args()
    if not options.tables:
        runs = options.runs or [named(suite) for suite in SUITES]
        print(keep(run_suites([wanted for run in runs for wanted in run])))
    for page in QUOTING:
        text = page.read_text(encoding="utf-8")
        filled = filled_in(text)
        if filled != text:
            write_text(page, filled)
            print(page)


if __name__ == "__main__":
    main()
