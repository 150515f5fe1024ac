"""Benchmarks that users run on their own machines: equality first, then ratios to what memory can do and to peers.

A suite is a module with a function ``cases(options)`` that yields one `Case` after the other; `run` proves and measures
them.
"""

from mmpos_bench.proofs import NotEqualError, equal, holds
from mmpos_bench.results import Entry, Measurement, Point, Report
from mmpos_bench.suites import SUITES, Case, Contestant, Lineup, Options, Role, run
from mmpos_bench.timing import Budget, Timing, compare

__all__ = [
    "SUITES",
    "Budget",
    "Case",
    "Contestant",
    "Entry",
    "Lineup",
    "Measurement",
    "NotEqualError",
    "Options",
    "Point",
    "Report",
    "Role",
    "Timing",
    "compare",
    "equal",
    "holds",
    "run",
]
