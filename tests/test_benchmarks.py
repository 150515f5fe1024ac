"""The benchmarks run, prove equality first, and write what they say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def bench(name: str, *options: str, **environment: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


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
        "one core, µs per image",
        "Transformers, decoded by Pillow",
        "Transformers, decoded by torchvision",
        "mmpos, patches of uint8",
        "mmpos, patches of float32",
        "mmpos, Transformers' float32 layout",
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
    assert sum("patches equal before timing" in line for line in said) == 2
    assert sum(line.count("target at least 3×: ") for line in said) == 4
    assert sum(line.count("target at least 1.8×: ") for line in said) == 4
    assert sum(line.count("target below 5,000: ") for line in said) == 4


@pytest.mark.slow
def test_the_collate_benchmark_takes_every_path_on_toy_sizes() -> None:
    said = bench("bench_collate", "--quick")
    rows = [re.split(r"  +", line.strip())[0] for line in said.splitlines()]
    want = ["packed", "packed, and ids", "padded", "plain loop, and ids", "8,192, whole", "8,192, text split"]
    assert [row for row in rows if row in want] == want
    assert "first-fit decreasing" in said
