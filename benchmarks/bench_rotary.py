"""Rotation of q and k: mmpos against a copy of the same bytes, the eager formula, its compilation, and peers.

python benchmarks/bench_rotary.py                      every shape and length on the GPU, else on one CPU thread
python benchmarks/bench_rotary.py --json results.json  also written down
python benchmarks/bench_rotary.py --tiny               every path once on toy sizes (Triton's interpreter will do)
"""

import argparse
import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import mmpos
from mmpos.bench.machine import stamp
from mmpos.bench.timing import Budget, Timing, compare
from mmpos.rotary import DevicePositions, Rotary, apply_rotary
from mmpos.rotary.apply import Implementation
from mmpos.rotary.sources import Positions

Call = Callable[[], object]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """A layer of a model: heads, and the rotation it uses."""

    q_heads: int
    k_heads: int
    head_dim: int
    allocation: str
    tokens: tuple[int, ...]


LONG = (2048, 8192, 32768, 131072, 262144)
SHAPES = {
    "7B layer": Shape(32, 8, 128, "interleaved", LONG),
    "72B layer": Shape(64, 8, 128, "interleaved", LONG),
    "vision encoder": Shape(16, 16, 80, "axial", LONG[:-1]),
    "decode, 7B": Shape(32, 8, 128, "interleaved", (256,)),
}


@dataclass(frozen=True)
class Case:
    """One measurement: tensors in bfloat16, and positions as a table, as dense ids, and as cos and sin."""

    q: Tensor
    k: Tensor
    rotary: Rotary
    table: DevicePositions
    dense: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def bytes(self) -> int:
        """Bytes that a rotation must read and write."""
        return 2 * (self.q.nbytes + self.k.nbytes)


def positions_of(tokens: int) -> mmpos.PositionTable:
    """An image of 16×16 in every 320 tokens, as in an interleaved document; of 2×2 in every 8 of a toy."""
    side, text = (16, 64) if tokens >= 320 else (2, 4)
    images, rest = divmod(tokens, text + side * side)
    document: list[mmpos.Text | mmpos.Grid] = [mmpos.Text(text), mmpos.Grid(side, side)] * images
    if rest:
        document.append(mmpos.Text(rest))
    return mmpos.place(mmpos.SegmentTable.from_documents([document]))


def case_of(shape: Shape, tokens: int, device: str) -> Case:
    """Random tensors of a shape, and everything that contestants are given before the clock runs."""
    torch.manual_seed(0)
    rotary = Rotary(shape.head_dim, allocation=shape.allocation, axes=2)
    positions = positions_of(tokens)
    table = DevicePositions.from_table(positions, device)
    q, k = (
        torch.randn(1, tokens, heads, shape.head_dim, device=device).bfloat16()
        for heads in (shape.q_heads, shape.k_heads)
    )
    cos, sin = rotary.cos_sin(table, "transformers")
    dense = torch.from_numpy(positions.dense()).to(device)
    return Case(q, k, rotary, table, dense, cos.bfloat16(), sin.bfloat16())


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """The formula that models run today, given cos and sin."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    half = q.shape[-1] // 2
    turned_q = torch.cat((-q[..., half:], q[..., :half]), dim=-1)
    turned_k = torch.cat((-k[..., half:], k[..., :half]), dim=-1)
    return q * cos + turned_q * sin, k * cos + turned_k * sin


def contestants(case: Case) -> dict[str, Callable[[Tensor, Tensor], Pair]]:
    """Every way to rotate that can be had here."""
    compiled = torch.compile(eager)

    def ours(q: Tensor, k: Tensor, positions: Positions, implementation: Implementation = "auto") -> Pair:
        q_out, k_out = apply_rotary(q, k, positions, case.rotary, implementation=implementation)
        assert k_out is not None
        return q_out, k_out

    found: dict[str, Callable[[Tensor, Tensor], Pair]] = {
        "mmpos, table": lambda q, k: ours(q, k, case.table),
        "mmpos, dense ids": lambda q, k: ours(q, k, case.dense),
        "eager": lambda q, k: eager(q, k, case.cos, case.sin),
        "torch.compile": lambda q, k: compiled(q, k, case.cos, case.sin),
    }
    if os.environ.get("TRITON_INTERPRET") == "1":
        found["mmpos, interpreted"] = lambda q, k: ours(q, k, case.table, "triton")
    return found | peers(case) if case.q.is_cuda else found


def peers(case: Case) -> dict[str, Callable[[Tensor, Tensor], Pair]]:
    """Fused kernels of other projects, where installed; all are given cos and sin."""
    found: dict[str, Callable[[Tensor, Tensor], Pair]] = {}
    try:
        liger = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
        found["Liger"] = lambda q, k: tuple(
            x.transpose(1, 2) for x in liger.apply(q.transpose(1, 2), k.transpose(1, 2), case.cos, case.sin)
        )
    except ImportError:
        pass
    try:
        flash = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
        half = case.cos.shape[-1] // 2
        cos, sin = case.cos[0, :, :half].contiguous(), case.sin[0, :, :half].contiguous()
        found["flash-attention"] = lambda q, k: (flash(q, cos, sin), flash(k, cos, sin))
    except ImportError:
        pass
    return found


def check(case: Case, name: str, rotate: Callable[[Tensor, Tensor], Pair]) -> None:
    """Equality before timing: against the reference, within what bfloat16 cos and sin cost."""
    wanted = apply_rotary(case.q, case.k, case.table, case.rotary, implementation="reference")
    for got, want in zip(rotate(case.q.clone(), case.k.clone()), wanted, strict=True):
        assert want is not None
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < 8e-3, f"{name}: relative error {error:.1e}"


def device_timings(calls: dict[str, Call], rounds: int = 60) -> dict[str, Timing]:
    """Device seconds by events, all contestants in turn, with the cache flushed in between."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 10):
        for name, call in calls.items():
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 10:
                spent[name].append(begin.elapsed_time(end) / 1e3)
    return {name: Timing.of(values) for name, values in spent.items()}


def measure(case: Case, backward: bool, seconds: float, rounds: int) -> dict[str, Timing]:
    """Seconds of each contestant; backward adds the gradients of q and k."""
    calls: dict[str, Call] = {}
    for name, rotate in contestants(case).items():
        if name in ("mmpos, table", "mmpos, dense ids") or not backward:
            check(case, name, rotate)
        calls[name] = _with_gradients(case, rotate) if backward else _forward(case, rotate)
    q, k = torch.empty_like(case.q), torch.empty_like(case.k)

    def copy() -> None:
        for _ in range(2 if backward else 1):
            q.copy_(case.q)
            k.copy_(case.k)

    calls = {"copy": copy, **calls}
    return device_timings(calls) if case.q.is_cuda else compare(calls, Budget(seconds, rounds))


def _forward(case: Case, rotate: Callable[[Tensor, Tensor], Pair]) -> Call:
    return lambda: rotate(case.q, case.k)


def _with_gradients(case: Case, rotate: Callable[[Tensor, Tensor], Pair]) -> Call:
    q, k = case.q.clone().requires_grad_(), case.k.clone().requires_grad_()
    q_grad, k_grad = torch.randn_like(q), torch.randn_like(k)
    return lambda: torch.autograd.grad(rotate(q, k), (q, k), (q_grad, k_grad))


def main() -> None:
    """Measure, print, and write down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, every path once")
    parser.add_argument("--backward", action="store_true", help="also with gradients")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    torch.set_num_threads(1)
    print(f"{stamp('default')}, torch {torch.__version__}, {where}")
    rows = []
    for name, shape in SHAPES.items():
        lengths = (8,) if options.tiny else shape.tokens if device == "cuda" else (4096,)
        for tokens in lengths:
            for backward in (False, True) if options.backward or device == "cuda" or options.tiny else (False,):
                case = case_of(shape, tokens, device)
                times = measure(case, backward, *((0.0, 2) if options.tiny else (3.0, 11)))
                moved = case.bytes * (2 if backward else 1)
                print(f"\n{name}, {tokens} tokens, {'forward and backward' if backward else 'forward'}")
                for who, t in times.items():
                    share = times["copy"].median / t.median
                    print(f"  {who:<18} {t.micros:>32} µs {moved / t.median / 1e9:>8.0f} GB/s {share:>6.0%} of copy")
                    rows.append([name, tokens, backward, who, t.median, t.p20, t.p80, moved])
    if options.json:
        columns = ["shape", "tokens", "backward", "contestant", "median_s", "p20_s", "p80_s", "bytes"]
        options.json.write_text(
            json.dumps({"machine": str(stamp("default")), "device": where, "columns": columns, "rows": rows})
        )


if __name__ == "__main__":
    main()
