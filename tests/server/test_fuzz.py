"""Run the attacks of fuzz.py for a few seconds; only ``make fuzz`` limits the latency of health checks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import ATTACKS, Tally
from fuzz import Verdict, Witness, fuzz, rounds
from serving import serving
from waiting import eventually, without_torch

MEMORY = 400
"""MiB by which the server may grow: its caches and arenas still fill during the few seconds of the test."""


def verdict(**changes: object) -> Verdict:
    """Return the verdict on a faultless run, with these fields changed."""
    rest = {"MiB": 100.0, "descriptors": 5, "threads": 7}
    verdict_ = Verdict(Tally(), Witness([1.0, 2.0]), before=rest, after=rest, tracebacks=[], alive=True)
    for name, value in changes.items():
        setattr(verdict_, name, value)
    return verdict_


def test_the_verdict_names_faults() -> None:
    bad = Tally()
    bad.add("OK", "a")
    bad.add("UNKNOWN", "a", "how")
    bad.merge(bad)
    wrong = Witness([150.0, float("inf")])
    wrong.polite.update(["right", "wrong"])
    faults = {
        (): verdict(),
        ("2 UNKNOWN of a, first how",): verdict(tally=bad),
        ("2 tracebacks in the log, first this",): verdict(tracebacks=["this", "that"]),
        ("the server has died",): verdict(alive=False),
        ("1 wrong answers", "2 of 2 answers to health after 100 ms or never"): verdict(witness=wrong),
        ("103.0 MiB at the end, want <= 102.0", "6 descriptors at the end, want <= 5"): verdict(
            after={"MiB": 103.0, "descriptors": 6, "threads": 15}
        ),
        ("16 threads at the end, want <= 15",): verdict(after={"MiB": 102.0, "descriptors": 5, "threads": 16}),
    }
    assert {tuple(run.faults(100, 2)) for run in faults.values()} == set(faults)


@pytest.mark.slow
def test_a_server_withstands_attacks_for_a_few_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = without_torch(tmp_path)
    lines: list[str] = []
    verdict_ = asyncio.run(
        fuzz(4.0, "slow", list(ATTACKS), processes=0, settle=2.0, environment=environment, log=lines.append)
    )
    with capsys.disabled():
        print("", *lines, verdict_.report(), sep="\n")
    assert replace(verdict_, after=verdict_.before).faults(float("inf"), 0.0) == []
    assert len(lines) >= 2
    assert verdict_.after["MiB"] < verdict_.before["MiB"] + MEMORY
    assert verdict_.witness.polite["right"] > 0


@pytest.mark.slow
def test_attacks_leave_no_slot_taken() -> None:
    wanted = {"OK", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
    with serving(options={"methods": None}) as server:
        tally = asyncio.run(rounds(server.address, "slots", list(ATTACKS), time.time() + 3, 0))
        assert tally.statuses.keys() >= wanted
        assert tally.bad == {}
        assert eventually(lambda: not server.taken()), server.taken()
        assert server.metric("in_flight") == server.metric("streams") == 0
