"""The benchmarks run, prove equality first, and write what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmpos.bench import run
from mmpos.native import core

ROOT = Path(__file__).parent.parent
WORKLOADS = ["a", "b", "c", "d"]


def bench(name: str, *options: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


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
        "from lists, over images": ["0 images", "1 image"],
        "dense(out=) over the size of images": ["2×2", "4×4"],
        "from lists, over documents": ["1 document", "4 documents"],
        "dense(out=) over axes": ["1", "2", "3"],
    }
    peers = {group: [e.name for e in found.group(group)[0].entries if e.role == "peer"] for group in found.groups}
    looped, indexed = ["loop per image"], ["Transformers"]
    assert {group: who for group, who in peers.items() if who} == {
        "from lists to dense ids": looped,
        "from token ids to dense ids": indexed,
        "from token ids, over tokens": indexed,
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


# Ratios of one run in one process, with room for a machine that does other things too: a way that is lost costs more.
@pytest.mark.slow
@pytest.mark.skipif(core is None, reason="without the extension in C there is no such promise")
def test_dense_ids_are_written_about_as_fast_as_memory_is_filled() -> None:
    found = run("positions", only="dense(out=), rope-tie, int32")
    ratios = {m.name[0]: m.of_limit(m["dense(out=)"]) for m in found.measurements}
    assert list(ratios) == WORKLOADS
    assert all(ratio is not None and ratio < 3 for ratio in ratios.values()), ratios


@pytest.mark.slow
def test_batches_are_faster_than_the_loop_per_image() -> None:
    found = run("positions", peers=True, only="from lists to dense ids")
    ratios = {
        m.name[0]: [m.over_peers(m[f"mmpos, {scheme}"]) for scheme in ("rope-tie", "mrope")] for m in found.measurements
    }
    assert list(ratios) == WORKLOADS
    assert all(over["loop per image"] > 2 for name in "bc" for over in ratios[name]), ratios


@pytest.mark.slow
def test_the_rotary_benchmark_takes_every_path_on_toy_sizes(tmp_path: Path) -> None:
    bench("bench_rotary", "--tiny", "--json", str(tmp_path / "figures.json"), TRITON_INTERPRET="1")
    figures = json.loads((tmp_path / "figures.json").read_text())
    seen = {(shape, backward, who) for shape, _, backward, who, *_ in figures["rows"]}
    contestants = ["copy", "mmpos, table", "mmpos, dense ids", "eager", "torch.compile", "mmpos, interpreted"]
    shapes = ["7B layer", "72B layer", "vision encoder", "decode, 7B"]
    assert seen == {(shape, backward, who) for shape in shapes for backward in (False, True) for who in contestants}


@pytest.mark.slow
def test_the_service_benchmark_takes_every_path_on_toy_sizes() -> None:
    said = bench("bench_service", "--quick", "--malloc", "default")
    assert "malloc default" in said.splitlines()[0]
    rows = [re.split(r"  +", line.strip())[0] for line in said.splitlines()[1:]]
    echoed, placed = "echo", ["Place", "Place, requests logged"]
    places = ["Place, 1 document", "Place, 4 documents", "Place, 8 documents"]
    assert [row for row in rows if row in (echoed, *placed)] == [echoed, *placed] * 3
    at = [rows.index(name) for name in places]
    assert rows[at[0] : at[0] + 9] == [
        *places,
        "StreamPlace, items of 1 document",
        "StreamPlace, items of 4 documents",
        "Build, 1 document of text",
        "Build, 4 documents of text",
        "Build, 1 document with 2 photographs",
        "Build, 2 documents with 2 photographs",
    ]
    assert rows[-3:] == ["echo, plain stub", "Place, plain stub", "Place, mmpos.client"]
    assert said.count("target at most 2×: ") == said.count("target at most 1.3×: ") == 2
    assert said.count("target at least 20×: ") == 2


@pytest.mark.slow
def test_the_data_benchmark_takes_every_path_on_toy_sizes() -> None:
    said = bench("bench_data", "--quick").splitlines()
    rows = [re.split(r"  +", line.strip())[0] for line in said]
    once = [
        "collate, µs per batch",
        "4 × 64 tokens, packed",
        "4 × 64 tokens, padded",
        "tar to packed batches, µs per image",
        "no worker",
        "1 worker",
        "2 workers",
    ]
    assert [row for row in rows if row in once] == once * 2
    assert [line for line in said if line.startswith("malloc")] == [
        "malloc default, for all contestants",
        "malloc tuned, for all contestants",
    ]
    assert sum(line.count("target below 5,000: ") for line in said) == 4


@pytest.mark.slow
def test_the_collate_benchmark_takes_every_path_on_toy_sizes() -> None:
    said = bench("bench_collate", "--quick")
    rows = [re.split(r"  +", line.strip())[0] for line in said.splitlines()]
    want = ["packed", "packed, and ids", "padded", "plain loop, and ids", "8,192, whole", "8,192, text split"]
    assert [row for row in rows if row in want] == want
    assert "first-fit decreasing" in said
