"""Calls with large tensors: in messages, and in shared memory, against the same work in process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import mmpos
from mmpos.client import Client
from mmpos.positions.place import place
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos_bench.cases import Case, Contestant, Role
from mmpos_bench.proofs import equal, holds
from mmpos_bench.serving.processes import ServerProcess
from mmpos_bench.timing import Budget
from mmpos_server.config import Profiles, load

__all__ = ["Sharing"]

_BYTES = 2**29
_GROUP = "large tensors, one call at a time"
_PHOTOS = Path(mmpos.__file__).parent / "photos"


class Sharing:
    """Rotations of a model's q and k, and sequences with photographs.

    Args:
        settings: a file for those of the server, which takes larger requests than others.
    """

    def __init__(self, settings: IO[str]) -> None:
        settings.write(f"[limits]\nrequest_bytes = {_BYTES}\n")
        settings.flush()
        prefix = f"mmpos-bench-{os.getpid()}-"
        self.options = ("--config", settings.name, "--shared-memory", prefix)

    def cases(self, server: ServerProcess, tokens: int, documents: int, budget: Budget) -> Iterator[Case]:
        """Every case.

        Args:
            server: started with these options.
            tokens: of q and k.
            documents: with two photographs each.
            budget: of every contestant.
        """
        with (
            Client(server.address, timeout=120) as plain,
            Client(server.address, timeout=120, shared_memory=_BYTES) as shares,
        ):
            if find_spec("torch") is not None:
                yield _rotate(plain, shares, tokens, budget)
            yield _build(plain, shares, documents, budget)


def _rotate(plain: Client, shares: Client, tokens: int, budget: Budget) -> Case:
    import torch

    from mmpos.rotary import Rotary, apply_rotary

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(tokens, heads, 128, generator=generator).bfloat16() for heads in (32, 8))
    rotary, side = Rotary(128), 4
    table = place(SegmentTable.from_documents([[Text(tokens - side**2 - 1), Grid(side, side), Text(1)]]))
    asked = (q, k, table, rotary)
    want: Any = apply_rotary(*asked)

    def prove(call: Callable[[], Any]) -> None:
        for got, wanted in zip(call(), want, strict=True):
            equal(got.view(torch.int16), wanted.view(torch.int16))  # numpy has no bfloat16

    work = {"calls": 1, "tokens": tokens, "bytes": 2 * (q.nbytes + k.nbytes)}
    calls = (partial(plain.apply_rotary, *asked), partial(shares.apply_rotary, *asked))
    name = f"Rotate, {tokens:,} tokens of 32 + 8 heads of 128 in bfloat16"
    return _case(name, partial(apply_rotary, *asked), calls, prove, work, budget)


def _build(plain: Client, shares: Client, documents: int, budget: Budget) -> Case:
    photographs = [(_PHOTOS / f"{name}.jpg").read_bytes() for name in ("chelsea", "coffee")]
    asked = [["A cat: ", photographs[0], " and a cup: ", photographs[1]]] * documents
    builder = Profiles.from_config(load()).default.builder
    want = builder.build_batch(asked)

    def prove(call: Callable[[], Any]) -> None:
        found = call()
        holds(len(found) == len(want), f"{len(found)} sequences", len(want))
        for got, wanted in zip(found, want, strict=True):
            equal(got.input_ids, wanted.input_ids)
            equal(got.patches, wanted.patches)

    patches = sum(sequence.patches.nbytes for sequence in want if sequence.patches is not None)
    work = {"calls": 1, "documents": documents, "bytes": sum(map(len, photographs)) * documents + patches}
    calls = (partial(plain.build_batch, asked), partial(shares.build_batch, asked))
    name = f"Build, {counted(documents, 'document')} with 2 photographs"
    return _case(name, partial(builder.build_batch, asked), calls, prove, work, budget)


def _case(
    name: str,
    here: Callable[[], object],
    calls: tuple[Callable[[], object], Callable[[], object]],
    prove: Callable[[Callable[[], Any]], None],
    work: dict[str, int],
    budget: Budget,
) -> Case:
    contestants = (
        Contestant("in process", here, Role.LIMIT),
        Contestant("mmpos, messages", calls[0], Role.PART, partial(prove, calls[0])),
        Contestant("mmpos, shared memory", calls[1], Role.OURS, partial(prove, calls[1])),
    )
    return Case(_GROUP, name, contestants, work, "calls", budget=budget)
