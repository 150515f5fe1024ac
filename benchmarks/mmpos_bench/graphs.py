"""CUDA graphs whose positions change at every replay: no wait of the host, no kernel compiled anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle

import torch

from mmpos.rotary import DevicePositions, apply_rotary
from mmpos_bench.cases import Case, Contestant, Later, Options, Role
from mmpos_bench.gpu import by_events
from mmpos_bench.layers import SHAPES, Layer, interleaved
from mmpos_bench.proofs import NotEqualError, holds
from mmpos_bench.timing import Budget
from mmpos_bench.workloads import Document, workload

__all__ = ["cases"]

_BUDGET = Budget(0.0, 61)


def cases(options: Options) -> Iterator[Later]:
    """A layer at the size of a decoding step and of a training step."""
    group = "a CUDA graph replayed, positions changed every time"
    for tokens in (64,) if options.quick else (256, 8192):
        name = f"7B layer, {tokens:,} tokens"
        yield Later(group, name, partial(_replayed, group, name, tokens, options))


def _replayed(group: str, name: str, tokens: int, options: Options) -> Case:
    """Refresh the table and replay; the limit is the replay of a copy."""
    variants = _variants(tokens)
    layers = [Layer(SHAPES["7B layer"], documents, torch.bfloat16, "cuda") for documents in variants]
    layer = layers[0]
    capacity = max(one.positions.num_segments for one in layers)
    device = DevicePositions.from_table(layer.positions, "cuda", capacity)
    q_out, k_out = torch.empty_like(layer.q), torch.empty_like(layer.k)

    def copy() -> None:
        q_out.copy_(layer.q)
        k_out.copy_(layer.k)

    def rotate() -> None:
        q, k = apply_rotary(layer.q, layer.k, device, layer.rotary)
        assert k is not None
        q_out.copy_(q)
        k_out.copy_(k)

    def rotate_in_place() -> None:
        apply_rotary(q_out, k_out, device, layer.rotary, inplace=True)

    copied, rotated, turned = (_capture(call) for call in (copy, rotate_in_place, rotate))
    turns = cycle(layers)
    compiled = _compiled()

    def step(graph: torch.cuda.CUDAGraph) -> None:
        device.refresh(next(turns).positions)
        graph.replay()

    def prove() -> None:
        for one in layers:
            with _no_waits():
                device.refresh(one.positions)
                turned.replay()
            one.judge((q_out, k_out), (layer.q, layer.k))
            copied.replay()
            device.refresh(one.positions)
            rotated.replay()
            one.judge((q_out, k_out), (layer.q, layer.k))
        holds(_compiled() == compiled, f"{_compiled()} kernels", f"{compiled}, those of the capture")

    def facts() -> Mapping[str, float]:
        return {"kernels compiled after the capture": _compiled() - compiled}

    contestants = (
        Contestant("copy, replayed", copied.replay, Role.LIMIT),
        Contestant("refresh, and in place", lambda: step(rotated), proof=prove),
        Contestant("in place, the same positions", rotated.replay, Role.PART, prove),
        Contestant("refresh alone", lambda: device.refresh(next(turns).positions), Role.PART, prove),
    )
    return Case(
        group,
        name,
        contestants,
        layer.work,
        budget=None if options.quick else _BUDGET,
        facts=facts,
        timer=by_events,
    )


def _variants(tokens: int) -> list[list[Document]]:
    """One document of so many tokens, with more and fewer images, at other places."""
    return [interleaved(tokens), workload(1, tokens, 1, 4), workload(1, tokens, 2, 4), workload(1, tokens, 0, 1)]


def _capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The graph of a call, after three to warm up in a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@contextmanager
def _no_waits() -> Iterator[None]:
    """Nothing inside makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise NotEqualError(f"got a wait for the device ({error}), want none") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def _compiled() -> int:
    """How often Triton has compiled the kernel in this process."""
    from mmpos.rotary.kernel.rotate import rotary_kernel

    return sum(len(caches[0]) for caches in rotary_kernel.device_caches.values())
