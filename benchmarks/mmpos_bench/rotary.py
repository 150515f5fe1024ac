"""Rotations of q and k: into new tensors, in place and with gradients, against a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from mmpos.support.checks import counted
from mmpos.support.extras import needed_for
from mmpos_bench.cases import Case, Later, Options, Point
from mmpos_bench.timing import Budget

with needed_for("the rotary suite", extra="all"):
    import torch

    from mmpos_bench import graphs
    from mmpos_bench.gpu import by_events
    from mmpos_bench.layers import SHAPES, Layer, Shape, interleaved
    from mmpos_bench.norms import normalised
    from mmpos_bench.rotations import fresh, inplace, with_gradients
    from mmpos_bench.stores import stored

__all__ = ["cases"]

Make = Callable[[str, str, Layer, Options], Case]

_DTYPES = (torch.bfloat16, torch.float32)
_LONG = (2048, 8192, 32768, 131072, 262144)
_DECODE = 256
_SHAPE = SHAPES["7B layer"]
_BUDGET, _CURVE, _EVENTS = Budget(1.0, 15), Budget(0.5, 11), Budget(0.0, 61)


def cases(options: Options) -> Iterator[Case | Later]:
    """Every case of the suite: on the GPU where there is one, else on one CPU thread, but where threads are counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        yield from _shapes(device, options)
        yield from _stores(device, options)
        yield from _curves(device, options)
        if device == "cuda":
            yield from graphs.cases(options)
        else:
            yield from _over_threads(threads, options)
    finally:
        torch.set_num_threads(threads)


def _shapes(device: str, options: Options) -> Iterator[Later]:
    """Every layer at every length."""
    lengths = (8,) if options.quick else _LONG if device == "cuda" else (4096,)
    layers = [(name, tokens) for name in SHAPES for tokens in lengths if _fits(SHAPES[name], tokens, device)]
    # What is compiled takes seconds for each.
    layers = layers[::2] if options.quick else [*layers, ("7B layer", _DECODE)]
    for dtype in _DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for group, make in ((f"into new tensors, {kind}", fresh), (f"in place, {kind}", inplace)):
            for name, tokens in layers[: 1 if options.quick and dtype == torch.float32 else None]:
                layer = partial(Layer, SHAPES[name], interleaved(tokens), dtype, device)
                yield _later(group, f"{name}, {tokens:,} tokens", make, layer, options)
    for name, tokens in layers[: 1 if options.quick else None]:
        layer = partial(Layer, SHAPES[name], interleaved(tokens), torch.bfloat16, device)
        yield _later("norm and rotation, bfloat16", f"{name}, {tokens:,} tokens", normalised, layer, options)
        yield _later("forward and backward, bfloat16", f"{name}, {tokens:,} tokens", with_gradients, layer, options)


def _stores(device: str, options: Options) -> Iterator[Later]:
    """From the projection to attention, as servers do it, in prefill and in decode."""
    for tokens in (8,) if options.quick else (_DECODE, *_LONG[:3]) if device == "cuda" else (_DECODE, 4096):
        layer = partial(Layer, _SHAPE, interleaved(tokens), torch.bfloat16, device)
        yield _later("norm, rotation and store, bfloat16", f"7B layer, {tokens:,} tokens", stored, layer, options)


def _curves(device: str, options: Options) -> Iterator[Later]:
    """How time per token goes with tokens and with documents, in place, where nothing is allocated."""
    most = 64 if options.quick else 262144 if device == "cuda" else 32768
    for tokens in (16, 64, 256, 1024, 4096, 16384, 32768, 65536, 262144):
        if tokens <= most and _fits(_SHAPE, tokens, device):
            point = Point("tokens, an image of 16×16 in every 320", tokens)
            layer = partial(Layer, _SHAPE, interleaved(tokens), torch.bfloat16, device)
            yield _later("in place over tokens", f"{tokens:,} tokens", inplace, layer, options, point)
    tokens = 64 if options.quick else 8192
    for count in (1, 2) if options.quick else (1, 2, 8, 64, 512):
        point = Point(f"documents, {tokens:,} tokens in all", count)
        layer = partial(Layer, _SHAPE, interleaved(tokens, count), torch.bfloat16, device)
        yield _later("in place over documents", counted(count, "document"), inplace, layer, options, point)


def _over_threads(threads: int, options: Options) -> Iterator[Later]:
    """In as many threads as torch would take here, a copy likewise."""
    layer = partial(Layer, _SHAPE, interleaved(64 if options.quick else 4096), torch.bfloat16, "cpu")
    for count in sorted({1, threads, *(2**i for i in range(threads.bit_length()) if 2**i <= threads)}):
        torch.set_num_threads(count)
        name = counted(count, "thread")
        yield _later("in place over threads", name, inplace, layer, options, Point("threads", count))


def _fits(shape: Shape, tokens: int, device: str) -> bool:
    """Whether a GPU has memory for q and k in float32 a dozen times: contestants make copies of their own."""
    if device != "cuda":
        return True
    needed = 12 * 4 * tokens * (shape.q_heads + shape.k_heads) * shape.head_dim
    return needed <= torch.cuda.get_device_properties(0).total_memory


def _later(
    group: str, name: str, make: Make, layer: Callable[[], Layer], options: Options, point: Point | None = None
) -> Later:
    """A case by one of the ways to rotate, timed as its device wants it."""

    def case() -> Case:
        rotated = layer()
        found = replace(make(group, name, rotated, options), point=point)
        if rotated.device == "cuda":
            return replace(found, timer=by_events, budget=None if options.quick else _EVENTS)
        return replace(found, budget=None if options.quick else _BUDGET if point is None else _CURVE)

    return Later(group, name, case)
