"""Run launches on the machine as a GPU of one architecture, and print how many and what went wrong as JSON.

test_machine_launches.py runs it in a process without the interpreter: ``python sample.py sm_90 0 57`` runs 57 forms of
launches, drawn with seed 0, every kind equally often, each compiled once and run with several numbers of tokens.
Without numbers, it plants faults in a kernel, and prints how each was found.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import launches
import standin
import torch
from accesses import Fault
from launches import F32, LAYERS, Launch, checks
from ptx import Address, Instruction, Operand

from mmpos.rotary.kernel import tiling

SIZES = (1, 7, 33)
"""Numbers of tokens that the programs of a few tokens share; four warps run a block and a bit."""

own_tiles = tiling.tiles


def launches_of(seed: int, count: int) -> Iterator[tuple[Launch, bool]]:
    """Yield the launches of a sample, with several numbers of tokens, and whether their programs have four warps."""
    for i, launch in enumerate(launches.sample(seed, count)):
        block, wide = own_tiles(4096, 3, LAYERS[launch.layer][2] // 2)[0], i % 4 == 3
        for tokens in (block + 3,) if wide else SIZES:
            yield replace(launch, tokens=max(tokens, launch.documents)), wide


def wrong(launch: Launch, seed: int, wide: bool) -> dict[str, float]:
    """Run a launch; return the checks that failed, or the fault that the machine found."""
    tiling.tiles = lambda tokens, heads, pairs: own_tiles(max(tokens, 4096 * wide), heads, pairs)
    try:
        return {name: share for name, share in checks(launch, seed) if not share <= 1}
    except Fault as fault:
        return {str(fault): 0.0}


def sample(seed: int, count: int) -> dict[str, object]:
    """Run a sample; return what went wrong, and how often each kernel ran."""
    failed = {str(launch): wrong(launch, i, wide) for i, (launch, wide) in enumerate(launches_of(seed, count))}
    kernels = Counter(launch.program.name for launch in standin.launches)
    return {"wrong": {name: checks for name, checks in failed.items() if checks}, "kernels": kernels}


FAULTS: dict[str, tuple[str, Callable[[Instruction], Instruction]]] = {
    "barrier": (r"bar\.sync", lambda x: x._replace(opcode="bar.warp.sync", operands=("-1",))),
    "address": (r".*ld\.global\.v4.* 0 \]", lambda x: x._replace(operands=(x.operands[0], shifted(x.operands[1])))),
    "target": (r".*st\.global.* 0 \]", lambda x: x._replace(operands=(shifted(x.operands[0]), x.operands[1]))),
    "no mask": (r"@%p\d+ st\.global", lambda x: x._replace(guard="")),
    "no store": (r"@%p\d+ st\.global", lambda x: x._replace(opcode="mov.b32", operands=("_", "0"))),
}
"""Faults to plant: a pattern of instructions, and what becomes of one of them."""


def shifted(address: Operand) -> Operand:
    """Shift an address by 16 bytes, so that it stays aligned."""
    assert isinstance(address, Address)
    return address._replace(offset=address.offset + 16)


def planted() -> dict[str, list[str]]:
    """Plant faults in a compiled kernel, one at a time; return what was wrong for each, or "" if nothing was."""
    launch = Launch("backward", norm="qk", tokens=43, layer="heads of 64", dtype=F32, turning="sections")
    if failed := wrong(launch, 0, True):
        raise ValueError(failed)
    (handle,) = (handle for handle, program in standin.programs.items() if program.name == "backward_kernel")
    program, verdicts = standin.programs[handle], dict[str, list[str]]()
    for name, (pattern, change) in FAULTS.items():
        places = [i for i, x in enumerate(program.code) if re.match(pattern, x.text)]
        for i in places[:: len(places) // 8 + 1]:
            code = (*program.code[:i], change(program.code[i]), *program.code[i + 1 :])
            standin.programs[handle] = program._replace(code=code)
            verdicts.setdefault(name, []).append(next(iter(wrong(launch, 0, True)), ""))
    return verdicts


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, so that elements never written show up
    with tempfile.TemporaryDirectory() as folder:
        standin.use(sys.argv[1], Path(folder))
        print(json.dumps(sample(*map(int, sys.argv[2:])) if sys.argv[2:] else planted()))
