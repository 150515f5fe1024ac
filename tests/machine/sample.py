"""Run launches on the machine as a GPU of one architecture, and print how many and what went wrong as JSON.

test_launches.py runs it in a process without the interpreter: ``python sample.py sm_90 0 57`` runs 57 launches, drawn
with seed 0 from all combinations below, every kind equally often; 0 launches means one for each kernel.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import machine
import standin
from accesses import Fault
from launches import BF16, F16, F32, FORMS, LAYERS, STRIDES, Launch, checks

from mmpos.rotary.kernel import tiling

KINDS = {
    "rotate": Launch("rotate"),
    "backward with norm": Launch("backward", norm="qk"),
    "store": Launch("store", norm="qk", return_k=True),
    "rerotate": Launch("rerotate"),
    "dense": Launch("dense"),
    "rotate in place": Launch("rotate", inplace=True),
    "rotate as Transformers": Launch("rotate", turning="as Transformers"),
    "rotate by cos and sin": Launch("cached"),
    "rotate by head": Launch("rotate", layer="by head", turning="by head"),
    "norm": Launch("rotate", norm="qk"),
    "norm after": Launch("rotate", norm="qk", after=True),
    "norm in place": Launch("rotate", norm="q", inplace=True, offset=1.0),
    "backward": Launch("backward"),
    "backward with norm after": Launch("backward", norm="qk", after=True),
    "store without norm": Launch("store"),
    "store in place": Launch("store", inplace=True, return_k=True, slots="int32"),
    "rerotate other caches": Launch("rerotate", cache="HND", slots="int32"),
}
"""All kinds of launches; the first five use every kernel."""

DTYPES = (BF16, F16, F32)
TURNINGS = ("interleaved", "adjacent", "half of a head", "a quarter of a head, adjacent")
SIZES = ("1 token", "7 tokens", "33 tokens", "a block of four warps, and a bit")
HEAD_DIMS = (16, 64, 80, 96, 128, 256)
COMBINATIONS = len(KINDS) * len(DTYPES) * len(TURNINGS) * len(SIZES) * len(HEAD_DIMS) * (1 + len(STRIDES)) * len(FORMS)

own_tiles = tiling.tiles


def drawn(kind: str, draw: random.Random) -> tuple[Launch, bool]:
    """Draw a launch of a kind, and whether its programs have four warps."""
    launch, size = KINDS[kind], draw.choice(SIZES)
    if launch.layer != "by head":
        launch = replace(launch, layer=f"heads of {draw.choice(HEAD_DIMS)}")
    if launch.turning == "interleaved":
        launch = replace(launch, turning=draw.choice(TURNINGS))
    wide = size == SIZES[-1]
    block = own_tiles(4096, 3, LAYERS[launch.layer][2] // 2)[0]
    tokens = block + 3 if wide else int(size.split()[0])
    forms = {"cached": ["table", "int32"], "dense": ["table", "fractions"]}.get(launch.kind, list(FORMS))
    if launch.turning == "by head":
        forms = ["table", "int32", "capacity"]
    strides = draw.choice(["fused", *STRIDES])
    return replace(launch, tokens=tokens, dtype=draw.choice(DTYPES), strides=strides, form=draw.choice(forms)), wide


def launches_of(seed: int, count: int) -> Iterator[tuple[Launch, bool]]:
    """Yield the launches of a sample."""
    draw, kinds = random.Random(seed), list(KINDS)
    for i in range(count or 5):
        yield drawn(kinds[i % len(kinds)], draw)


def main(architecture: str, seed: int, count: int) -> dict[str, object]:
    """Run a sample; return what went wrong, and how much ran."""
    wrong, kernels = {}, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        standin.use(architecture, Path(folder))
        for i, (launch, wide) in enumerate(launches_of(seed, count)):
            tiling.tiles = lambda tokens, heads, pairs, most=4096 * wide: own_tiles(max(tokens, most), heads, pairs)
            try:
                shares = {name: share for name, share in checks(launch, i) if not share <= 1}
            except Fault as fault:
                shares = {str(fault): 0.0}
            if shares:
                wrong[str(launch)] = shares
        kernels.update(launch.program.name for launch in standin.launches)
    return {"wrong": wrong, "kernels": kernels, "instructions": machine.executed.total()}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
