"""The benchmarks run, prove equality first, and write what they say."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from pages import RESULTS

from mmpos.errors import ServiceError
from mmpos_bench import NotEqualError, run
from mmpos_bench.results import SuiteReport, from_json
from mmpos_bench.serving import Load, Order, clients, echo, started

WORKLOADS = ["a", "b", "c", "d"]


@pytest.mark.slow
def test_the_positions_suite_takes_every_path_on_toy_sizes() -> None:
    found = run("positions", peers=True, quick=True)
    assert found.missing == {}
    names = {group: [m.name.partition(":")[0] for m in found.group(group)] for group in found.groups}
    filled = [f"dense(out=), {kind}" for kind in ("rope-tie, int32", "mrope, int32", "rope-tie, int64")]
    whole = ["from lists to dense ids", *filled, "dense(out=), rope-tie-v2, float64", "dense() in a new array"]
    whole += ["from token ids to dense ids", "tables from a table", "padded ids and mask"]
    assert names == {
        **dict.fromkeys(whole, WORKLOADS),
        "dense(out=) over tokens": ["1,024 tokens", "4,096 tokens"],
        "from token ids, over tokens": ["1,024 tokens", "4,096 tokens"],
        "rope_index, over tokens": ["1,024 tokens", "4,096 tokens"],
        "from lists, over images": ["0 images", "1 image"],
        "dense(out=) over the size of images": ["2×2", "4×4"],
        "from lists, over documents": ["1 document", "4 documents"],
        "dense(out=) over axes": ["1", "2", "3"],
        "rope_index, of other methods": [
            "MiniCPM-V 4.7, pictures of four slices",
            "GLM-Image, prompts with images",
            "Qwen2.5-VL, 8 videos",
        ],
    }
    peers = {group: [e.name for e in found.group(group)[0].entries if e.role == "peer"] for group in found.groups}
    looped, indexed = ["loop per image"], ["Transformers"]
    assert {group: who for group, who in peers.items() if who} == {
        "from lists to dense ids": looped,
        "from token ids to dense ids": indexed,
        "from token ids, over tokens": indexed,
        "rope_index, over tokens": indexed,
        "rope_index, of other methods": indexed,
        "from lists, over images": looped,
        "from lists, over documents": looped,
    }
    assert all(m.limit is not None for m in found.measurements)


@pytest.mark.slow
def test_the_images_suite_takes_every_path_on_toy_sizes() -> None:
    found = run("images", peers=True, quick=True)
    assert found.missing == {}
    theirs = ["Transformers, Pillow", "Transformers, torchvision"]
    stages = ["header", "decode", "resize to 140×84", "patches", "Transformers' layout of patches"]
    assert {group: [e.name for e in found.group(group)[0].entries] for group in found.groups} == {
        "JPEG to patches of uint8": ["copy of the patches", "mmpos", *theirs],
        "JPEG to patches of float32": [
            "copy of the patches",
            "mmpos, Transformers' layout",
            "mmpos, each pixel once",
            *theirs,
        ],
        "stages of JPEG to patches": ["copy of the patches", *stages],
        "JPEG to patches, over the size of images": ["copy of the patches", "mmpos", *theirs],
        "JPEG to patches, over threads": ["copy of the patches", "mmpos"],
    }


# Ratios are measured when figures are recorded, and not here, where whatever else runs would decide.


def kept(suite: str) -> list[SuiteReport]:
    """Its reports of every machine."""
    paths = [path for path in RESULTS.glob("*.json") if re.fullmatch(r"(?!neighbours)[^.]+", path.stem)]
    reports = [report for path in paths for report in from_json(path.read_text(encoding="utf-8"))]
    return [report for report in reports if report.suite == suite]


def test_dense_ids_were_written_about_as_fast_as_memory_is_filled_and_batches_before_the_loop_per_image() -> None:
    for report in kept("positions"):
        filled, built = report.group("dense(out=), rope-tie, int32"), report.group("from lists to dense ids")
        assert [[m.name[0] for m in group] for group in (filled, built)] == [WORKLOADS] * 2
        assert max(m.of_limit(m["dense(out=)"]) or 3 for m in filled) < 2
        over = [m.over_peers(m[f"mmpos, {scheme}"]) for m in built[1:3] for scheme in ("rope-tie", "mrope")]
        assert min(peers["loop per image"] for peers in over) > 10


def test_a_cpu_rotated_about_as_fast_as_memory_is_copied() -> None:
    found = [m for report in kept("rotary") for m in report.group("in place, bfloat16") if "7B layer, 4" in m.name]
    assert max(m.of_limit(m["mmpos, table"]) or 3 for m in found) < 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the suite is another one")
def test_the_rotary_suite_takes_every_path_on_toy_sizes() -> None:
    found = run("rotary", peers=True, quick=True)
    assert sorted(found.missing) == ["Liger", "Liger, norm too", "flash-attention", "flashinfer", "torchtitan"]
    layers, ours = ["7B layer, 8 tokens", "vision encoder, 8 tokens"], ["mmpos, table", "mmpos, dense ids"]
    fresh, inplace = (f"{way}, bfloat16" for way in ("into new tensors", "in place"))
    assert {group: [m.name for m in found.group(group)] for group in found.groups} == {
        fresh: layers,
        inplace: layers,
        "into new tensors, float32": layers[:1],
        "in place, float32": layers[:1],
        "norm and rotation, bfloat16": layers[:1],
        "forward and backward, bfloat16": layers[:1],
        "norm, rotation and store, bfloat16": layers[:1],
        "in place over tokens": ["16 tokens", "64 tokens"],
        "in place over documents": ["1 document", "2 documents"],
        "in place over threads": [m.name for m in found.group("in place over threads")],
    }
    peers, parts = ["eager formula", "torch.compile", "Transformers"], ["mmpos, reference"]
    assert {group: [e.name for e in found.group(group)[0].entries] for group in found.groups[:2]} == {
        fresh: ["copy into new tensors", *ours, *parts, "cos and sin alone", *peers],
        inplace: ["copy", *ours, *parts],
    }
    server = ["copy", "mmpos, one call", "norm and rotation, then store", "separate operations"]
    assert [e.name for e in found.group("norm, rotation and store, bfloat16")[0].entries] == server
    gradients = found.group("forward and backward, bfloat16")[0]
    assert [e.name for e in gradients.entries] == ["copies into new tensors", *ours, *parts, *peers]
    assert all(m.limit is not None for m in found.measurements)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_rotary_suite_replays_graphs_on_a_gpu_and_compiles_nothing_for_other_positions() -> None:
    found = run("rotary", quick=True)
    (replayed,) = found.group("a CUDA graph replayed, positions changed every time")
    assert replayed.facts == {"kernels compiled after the capture": 0}


@pytest.mark.slow
def test_the_data_suite_takes_every_path_on_toy_sizes() -> None:
    found = run("data", peers=True, quick=True)
    assert found.missing == {}
    packs = [
        f"{size} tokens, {mode}" for size in ("8,192", "4,096", "32,768") for mode in ("whole documents", "text split")
    ]
    assert {group: [m.name for m in found.group(group)] for group in found.groups} == {
        "collate": ["4 documents of 64 tokens, 2 images of 4×4 each"],
        "collate over documents": ["1 document", "4 documents"],
        "packs of a stream": packs,
        "packs of lengths known at once": ["8,192 tokens"],
        "tar to packed batches": ["4 JPEG files of 128×96"],
    }
    stages = ["packed", "padded", "tables joined", "one of two shards"]
    batches = ["copies into new tensors", "packed, and ids", "padded, and ids", *stages, "plain loop, and ids"]
    assert [e.name for e in found.measurements[0].entries] == batches
    loaders = ["mmpos, no worker", "mmpos, 1 worker", "Transformers, no worker", "Transformers, 1 worker"]
    assert [e.name for e in found.measurements[-1].entries] == ["copy of the patches", *loaders]
    whole, split = found.group("packs of a stream")[:2]
    assert whole.facts["fill in order of arrival"] < whole.facts["fill"] < split.facts["fill"] <= 1
    assert whole.facts["cuts"] == split.facts["truncated"] == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the processor time of a server")
def test_the_service_suite_takes_every_path_on_toy_sizes() -> None:
    found = run("service", quick=True)
    places = ["Place, 1 document", "Place, 4 documents"]
    assert {group: [m.name for m in found.group(group)] for group in found.groups} == {
        "server CPU of a call": [*places, "Place, 4 documents, dense ids"],
        "calls at once": [
            *places,
            "StreamPlace, items of 1 document",
            "StreamPlace, items of 4 documents",
            "Build, 1 document of text",
            "Build, 4 documents of text",
            "Build, 1 document with 2 photographs",
            "Build, 2 documents with 2 photographs",
        ],
        "Place over documents": places,
        "latency at one in flight": places[:1],
        "large tensors, one call at a time": [
            "Rotate, 64 tokens of 32 + 8 heads of 128 in bfloat16",
            "Build, 2 documents with 2 photographs",
        ],
    }
    assert {group: [e.name for e in found.group(group)[0].entries] for group in found.groups} == {
        "server CPU of a call": ["echo", "mmpos", "mmpos, requests logged"],
        "calls at once": ["echo", "mmpos"],
        "Place over documents": ["echo", "mmpos"],
        "latency at one in flight": ["echo, plain stub", "plain stub", "mmpos.client"],
        "large tensors, one call at a time": ["in process", "mmpos, messages", "mmpos, shared memory"],
    }
    for rates in found.group("calls at once"):
        assert rates.facts["documents per second"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the processor time of a server")
def test_clients_refuse_another_answer_than_was_ordered() -> None:
    with started(echo("default")) as (server,), clients() as pool:
        right = Load(server, Order("unary", "/echo/Bytes3", b"anything", bytes(3), 0.01), pool)
        turn = right()
        assert len(turn.latencies) >= 1
        assert turn.cpu > 0
        assert right.turns == [turn]
        stream = replace(right.order, kind="stream", path="/echo/Stream3")
        assert Load(server, stream, pool)().per_second > 0
        with pytest.raises(NotEqualError, match="/echo/Bytes4: got 4 bytes, want other 3"):
            right.to(server, "/echo/Bytes4", bytes(3))()


def test_a_server_that_does_not_start_is_an_error() -> None:
    with pytest.raises(ServiceError, match="got none, want one that listens"), started([sys.executable, "-c", "pass"]):
        pass
