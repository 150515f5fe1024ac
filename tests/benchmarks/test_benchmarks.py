"""The suites run, prove equality first, and have the contestants that they say; kept figures are what pages claim."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

import pytest
import torch
from pages import RESULTS

from mmpos.errors import ServiceError
from mmpos_bench.proofs import NotEqualError
from mmpos_bench.results import SuiteReport, from_json
from mmpos_bench.rotary import GROUPS
from mmpos_bench.serving import Load, Order, clients, echo, started
from mmpos_bench.suites import run

IDS = ["mmpos, mrope", "mmpos, rope-tie"]
PATCHES = ["Transformers, Pillow", "Transformers, torchvision"]
ROTATIONS = ["eager formula", "torch.compile", "Transformers"]
WAYS = {f"{name}, bfloat16": [way.name for way in group.ways[1:]] for name, group in GROUPS.items()}
BATCHES = ["packed, and ids", "padded, and ids", "packed", "padded", "tables joined", "one of two shards"]

SUITES: Mapping[str, Mapping[str, tuple[int, list[str]]]] = {
    "positions": {
        "from lists to dense ids": (
            4,
            [*IDS[::-1], "table, a part", "place, a part", "dense, a part", "loop per image"],
        ),
        "dense(out=), rope-tie, int32": (4, ["dense(out=)"]),
        "dense(out=), rope-tie-v2, float64": (4, ["dense(out=)"]),
        "from token ids to dense ids": (4, [*IDS, "Transformers"]),
        "from token ids, over tokens": (2, [*IDS, "Transformers"]),
        "from lists, over images": (2, ["mmpos, from lists", "mmpos, from spans", "loop per image"]),
    },
    "images": {
        "JPEG to patches of uint8": (1, ["mmpos", *PATCHES]),
        "JPEG to patches of float32": (1, ["mmpos, Transformers' layout", "mmpos, each pixel once", *PATCHES]),
    },
    "data": {
        "collate": (1, [*BATCHES, "plain loop, and ids"]),
        "packs of a stream": (6, ["mmpos"]),
    },
    "service": {
        "server CPU of a call": (3, ["mmpos", "mmpos, requests logged"]),
        "calls at once": (8, ["mmpos"]),
    },
    "rotary": {name: (1, ways) for name, ways in WAYS.items()}
    | {
        "into new tensors, bfloat16": (2, WAYS["into new tensors, bfloat16"] + ROTATIONS),
        "in place, bfloat16": (2, WAYS["in place, bfloat16"]),
        "norm and rotation, bfloat16": (1, [*WAYS["norm and rotation, bfloat16"], "torch.compile, norm too"]),
        "forward and backward, bfloat16": (1, WAYS["forward and backward, bfloat16"] + ROTATIONS),
    },
}
"""For each group the number of cases, and the contestants beside the limit."""

ONLY = {
    "rotary": pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the suite is another one"),
    "service": pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the processor time of a server"),
}


@pytest.mark.slow
@pytest.mark.parametrize("suite", [pytest.param(suite, marks=ONLY.get(suite, ())) for suite in SUITES])
def test_a_suite_takes_every_path_on_toy_sizes(suite: str) -> None:
    found = run(suite, peers=True, quick=True)
    on_gpus = ["Liger", "flash-attention", "flashinfer"]
    assert sorted(found.missing) == (on_gpus if suite == "rotary" else [])
    assert list(found.groups) == list(SUITES[suite])
    for name, (count, contestants) in SUITES[suite].items():
        group = found.group(name)
        assert len(group) == count
        assert {m.entries[0].role for m in group} == {"limit"}
        assert [e.name for e in group[0].entries[1:]] == contestants
    if suite == "data":
        whole, split = found.group("packs of a stream")[:2]
        assert whole.facts["fill in order of arrival"] < whole.facts["fill"] < split.facts["fill"] <= 1
        assert whole.facts["cuts"] == split.facts["truncated"] == 0
    for rates in found.group("calls at once"):
        assert rates.facts["documents per second"] > 0


# Ratios are measured when figures are recorded, and not here, where whatever else runs would decide.


def kept(suite: str) -> list[SuiteReport]:
    """Its reports of every machine."""
    paths = [path for path in RESULTS.glob("*.json") if re.fullmatch(r"(?!neighbours)[^.]+", path.stem)]
    reports = [report for path in paths for report in from_json(path.read_text(encoding="utf-8"))]
    return [report for report in reports if report.suite == suite]


def test_dense_ids_were_written_about_as_fast_as_memory_is_filled_and_batches_before_the_loop_per_image() -> None:
    for report in kept("positions"):
        filled, built = report.group("dense(out=), rope-tie, int32"), report.group("from lists to dense ids")
        assert [[m.name[0] for m in group] for group in (filled, built)] == [["a", "b", "c", "d"]] * 2
        assert max(m.of_limit(m["dense(out=)"]) or 3 for m in filled) < 2
        over = [m.over_peers(m[f"mmpos, {scheme}"]) for m in built[1:3] for scheme in ("rope-tie", "mrope")]
        assert min(peers["loop per image"] for peers in over) > 10


def test_a_cpu_rotated_about_as_fast_as_memory_is_copied() -> None:
    found = [m for report in kept("rotary") for m in report.group("in place, bfloat16") if "7B layer, 4" in m.name]
    assert max(m.of_limit(m["mmpos, table"]) or 3 for m in found) < 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the processor time of a server")
def test_clients_refuse_another_answer_than_was_ordered() -> None:
    with started(echo("default")) as (server,), clients() as pool:
        right = Load(server, Order("/echo/Bytes3", b"anything", bytes(3), 0.01), pool)
        turn = right()
        assert turn.cpu > 0
        assert right.turns == [turn]
        assert right.to(server, "/echo/Stream3", bytes(3))().per_second > 0
        with pytest.raises(NotEqualError, match="/echo/Bytes4: got 4 bytes, want other 3"):
            right.to(server, "/echo/Bytes4", bytes(3))()


def test_a_server_that_does_not_start_is_an_error() -> None:
    with pytest.raises(ServiceError, match="got none, want one that listens"), started([sys.executable, "-c", "pass"]):
        pass
