"""Benchmarks that users run on their own machines: equality first, then ratios to what memory can do and to peers.

A suite is a module with a function ``cases(options)`` that yields a `Case` at a time, or a `Later` that makes one when
its turn comes; `run` proves and measures them.
"""

from mmpos_bench.cases import Case, Contestant, Later, Options, Point, Role
from mmpos_bench.proofs import NotEqualError, close, equal, holds
from mmpos_bench.results import Entry, Measurement, Report
from mmpos_bench.suites import SUITES, run
from mmpos_bench.timing import Budget, Timing, compare

__all__ = [
    "SUITES",
    "Budget",
    "Case",
    "Contestant",
    "Entry",
    "Later",
    "Measurement",
    "NotEqualError",
    "Options",
    "Point",
    "Report",
    "Role",
    "Timing",
    "close",
    "compare",
    "equal",
    "holds",
    "run",
]
