"""Benchmarks that users run on their own machines: equality first, then ratios to what memory can do and to peers.

A suite is a module with a function ``cases(options)`` that yields one `Comparison` after the other; `run` proves and
measures them.
"""

from mmpos_bench.proofs import NotEqualError, equal, holds
from mmpos_bench.results import Measurement, SuiteReport, Timed
from mmpos_bench.suites import SUITES, Comparison, Contestant, Lineup, Role, SuiteOptions, run
from mmpos_bench.timing import Budget, Timing, compare

__all__ = [
    "SUITES",
    "Budget",
    "Comparison",
    "Contestant",
    "Lineup",
    "Measurement",
    "NotEqualError",
    "Role",
    "SuiteOptions",
    "SuiteReport",
    "Timed",
    "Timing",
    "compare",
    "equal",
    "holds",
    "run",
]
