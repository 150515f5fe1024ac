"""A plugin of pytest that keeps what becomes of tests in a journal: `-p mmpos_bench.gpu.recorder`.

The variable MMPOS_JOURNAL names the file, and MMPOS_SUITE what its counts are of.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from mmpos_bench.gpu.journal import Journal, shortened

_EVERY = 100  # tests between two lines of counts


class Recorder:
    """Writes a line for each test that fails or is skipped, and counts of all now and then."""

    def __init__(self, journal: Journal, suite: str) -> None:
        self.journal, self.suite = journal, suite
        self.counts: Counter[str] = Counter()
        self.worst = 0.0
        self.seconds = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test by its call, or by what kept it from being called."""
        self.seconds += report.duration
        shares = [value for name, value in report.user_properties if name == "share_of_bound"]
        self.worst = max([self.worst, *(value for value in shares if isinstance(value, float))])
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.outcome != "passed":
                self.keep(report)
            if sum(self.counts.values()) % _EVERY == 0:
                self.count()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be read, which every worker says."""
        if report.failed and not self.journal.has("test", report.nodeid):
            self.counts[report.outcome] += 1
            self.keep(report)

    def keep(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Write what did not pass; of a long explanation the end says what is wrong."""
        told = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        self.journal.write("test", name=report.nodeid, outcome=report.outcome, error=shortened(told[-400:], 400))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the last counts."""
        self.count(exitstatus=int(exitstatus))

    def count(self, **more: int) -> None:
        """Write the counts so far."""
        values = {name: self.counts[name] for name in ("passed", "failed", "skipped")}
        self.journal.write(
            "tests", name=self.suite, **values, worst_share_of_bound=round(self.worst, 3),
            seconds=round(self.seconds, 1), **more,
        )  # fmt: skip


class LastRites:
    """Ends a worker whose CUDA context is lost, so that the next tests run in another one."""

    def pytest_runtest_logfinish(self) -> None:
        """Look after every test."""
        import torch

        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that sees all reports, and watch over workers."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.register(LastRites())
    else:
        journal = Journal(Path(os.environ["MMPOS_JOURNAL"]))
        config.pluginmanager.register(Recorder(journal, os.environ["MMPOS_SUITE"]))
