"""Run suites on this machine, write the figures to results/, and update the tables on pages.

python benchmarks/record.py                          every suite with every peer and both malloc settings
python benchmarks/record.py images service:tuned     only these suites; other figures are kept
python benchmarks/record.py --tables                 only update tables from existing figures; properties are measured
                                                     again, which is fast
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
"""Pages that may contain tables of results."""


schemes, encodings = cache(measure), cache(measure_encodings)
"""Properties of all forms of all schemes that place grids after text, and of all encodings."""


@cache
def latent_schemes() -> Matrix:
    """Measure the schemes of generation models."""
    names = [name for name, scheme in SCHEMES.items() if issubclass(scheme, LatentScheme)]
    return measure(names).part(names)


def definitions(matrix: Matrix) -> str:
    """Write one line per property, with its definition."""
    return "".join(f"- **{prop.title}**: {prop.definition}\n" for prop in matrix.properties)


def counterexamples(matrix: Matrix) -> str:
    """Write one line, with a counterexample, for each property that does not hold."""
    failed = ((name, prop) for name, prop, _ in matrix.reasons if matrix[name, prop.name].value is False)
    return "".join(f"- `{name}`, {prop.title}: {matrix[name, prop.name].why}\n" for name, prop in failed)


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
"""Page texts by name."""


def run_suites(runs: Sequence[tuple[str, str]]) -> list[SuiteReport]:
    """Run suites with the given malloc settings, each in its own process so that no suite affects the next."""
    reports: list[SuiteReport] = []
    for suite, malloc in runs:
        print(f"{suite}, malloc {malloc}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "mmpos", "bench", suite, "--peers", "--malloc", malloc, "--json", "-"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        reports += from_json(done.stdout)
    return reports


def keep(reports: Sequence[SuiteReport]) -> Path:
    """Write reports to this machine's file, replacing earlier ones with the same suite and malloc setting."""
    path = RESULTS / f"{reports[-1].machine.name}.json"
    earlier = from_json(path.read_text(encoding="utf-8")) if path.exists() else ()
    merged = {(report.suite, report.machine.malloc): report for report in (*earlier, *reports)}
    order = [(suite, malloc) for suite in SUITES for malloc in MALLOCS]
    write_text(path, to_json([merged[name] for name in order if name in merged]))
    return path


def named(run: str) -> list[tuple[str, str]]:
    """Parse SUITE or SUITE:MALLOC into (suite, malloc setting) pairs."""
    suite, _, malloc = run.partition(":")
    if suite not in SUITES or malloc not in ("", *MALLOCS):
        raise argparse.ArgumentTypeError(f"got {run!r}, want one of {', '.join(SUITES)}, optionally :default or :tuned")
    return [(suite, malloc)] if malloc else [(suite, name) for name in MALLOCS]


def quoted_table(name: str) -> str:
    """Write the table named "machine; suite; malloc; group"."""
    machine, suite, malloc, group = name.split("; ", 3)
    path = RESULTS / f"{machine}.json"
    for report in from_json(path.read_text(encoding="utf-8")) if path.exists() else ():
        if (report.suite, report.machine.malloc) == (suite, malloc) and report.group(group):
            return to_markdown(report.group(group))
    raise SystemExit(f"{name}: found no such figures in {RESULTS}")


def named_quote(quotes: Mapping[str, Callable[[], str]], name: str) -> str:
    """Return the page text with the given name."""
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
"""Marks on pages, and functions that write the text between the marks."""


def filled_in(page: str) -> str:
    """Return the page with all of its tables updated.

    Raises:
        SystemExit: there are no figures for a table, or a name is unknown.
    """
    for mark, write in MARKS.items():
        page = fill_in(page, mark, write)
    return page


def main() -> None:
    """Run suites unless --tables is set, and update the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=named, help="suites or SUITE:MALLOC; default all")
    parser.add_argument("--tables", action="store_true", help="only update the tables")
    options = parser.parse_args()
    if not options.tables:
        runs = options.runs or [named(suite) for suite in SUITES]
        print(keep(run_suites([pair for run in runs for pair in run])))
    for page in QUOTING:
        text = page.read_text(encoding="utf-8")
        filled = filled_in(text)
        if filled != text:
            write_text(page, filled)
            print(page)


if __name__ == "__main__":
    main()
