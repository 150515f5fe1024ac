"""Suites run with the recorded contestants."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fill_tables import RESULTS
from server_program import PATIENT

from mmpos.errors import ServiceError
from mmpos_bench.peers.rotations import DIFFUSERS
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.results import SuiteReport, from_json
from mmpos_bench.rotary import ALL_GROUPS, FUSED
from mmpos_bench.serving import Load, Order, clients, echo, service, started
from mmpos_bench.suites import SUITES, run

PLAIN = ["eager formula", "torch.compile", "Transformers"]
PEERS = {"into new tensors": PLAIN, "forward and backward": PLAIN, FUSED: [*DIFFUSERS]}
"""Peers by group of rotations on a CPU."""

ONLY = {
    "rotary": pytest.mark.skipif(torch.cuda.is_available(), reason="the suite differs with a GPU"),
    "service": pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports processor times of servers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("suite", [pytest.param(suite, marks=ONLY.get(suite, ())) for suite in SUITES])
def test_quick_suites_run_the_recorded_contestants(suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (settings := tmp_path / "mmpos.toml").write_text(PATIENT)
    monkeypatch.setattr("mmpos_bench.service.service", partial(service, "--config", str(settings)))
    report = run(suite, peers=True, quick=True)
    assert sorted(report.missing) == (["Liger", "flash-attention", "flashinfer"] if suite == "rotary" else [])
    ways = {
        f"{name}, bfloat16": [way.name for way in ALL_GROUPS[name].ways] + PEERS.get(name, []) for name in ALL_GROUPS
    }
    if suite == "rotary":
        assert contestants(report) == ways
    elif (recorded := from_json((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))).code == report.code:
        assert contestants(report) == contestants(recorded)
    assert {m.entries[0].role for m in report.measurements} == {"limit"}
    if suite == "data":
        whole, split = report.group("packs of a stream")[:2]
        assert whole.facts["fill in order of arrival"] < whole.facts["fill"] < split.facts["fill"] <= 1
        assert whole.facts["cuts"] == split.facts["truncated"] == 0
    for rates in report.group("calls at once"):
        assert rates.facts["documents per second"] > 0


def contestants(report: SuiteReport) -> dict[str, list[str]]:
    """Return the names of the contestants in each group, with the limit first."""
    return {name: [e.name for e in report.group(name)[0].entries] for name in report.groups}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports processor times of servers")
def test_clients_refuse_unexpected_answers() -> None:
    with started(echo()) as (server,), clients() as pool:
        order = Order("/echo/Bytes3", b"anything", bytes(3), 0.01)
        right = Load(server, order, pool)
        turn = right()
        assert turn.cpu > 0
        assert right.turns == [turn]
        assert Load(server, replace(order, path="/echo/Stream3"), pool)().per_second > 0
        with pytest.raises(NotEqualError, match="/echo/Bytes4: got 4 bytes, want the expected 3 bytes"):
            Load(server, replace(order, path="/echo/Bytes4"), pool)()


def test_a_server_that_does_not_start_causes_an_error() -> None:
    with pytest.raises(ServiceError, match="got no listening server"), started([sys.executable, "-c", "pass"]):
        pass
