"""Small kernels by hand: what each instruction computes, as the PTX manual describes it, and that faults are found."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import machine
import numpy as np
import pytest
import torch
from accesses import Fault
from operations import OPERATIONS
from ptx import BYTES, parse
from torch import Tensor

KERNEL = """
.version 8.8
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.global .align 4 .b32 table[2] = {{7, 4294967295}};
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 data,
	.param .u64 .ptr .global .align 1 other,
	.param .u32 number
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<20>;
	.reg .b64 	%rd<9>;
	.local .align 4 .b8 	__local_depot0[8];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd1, %r1, 8;
	ld.param.b64 %rd2, [data];
	add.s64 %rd2, %rd2, %rd1;
	ld.param.b64 %rd3, [other];
	shl.b32 %r2, %r1, 3;
{body}
	ret;
}}
"""
"""A kernel in which thread t has t in %r1, 8·t in %r2, and the address of the t-th 8 bytes of its data in %rd2."""


def run(body: str, *tensors: Tensor, threads: int = 32, blocks: int = 1, number: int = 0) -> None:
    """Run a kernel over tensors, whose first and last are its parameters "data" and "other"."""
    program = parse(KERNEL.format(threads=threads, body=body))
    parameters = {"data": tensors[0].data_ptr(), "other": tensors[-1].data_ptr(), "number": number}
    machine.run(program, (blocks, 1, 1), 2048, parameters, tensors)


def zeros(count: int = 32) -> Tensor:
    """Return 8 bytes for each thread."""
    return torch.zeros(count, dtype=torch.int64)


MOST, LEAST, BIG = 2**31 - 1, -(2**31), 2**40
TINY = 2.0**-149

COMPUTED: list[tuple[str, tuple[Any, ...], Any]] = [
    ("add.s16", (32767, 1), -32768), ("add.s32", (MOST, 1), LEAST), ("add.u32", (2**32 - 1, 2), 1),
    ("add.s64", (2**63 - 1, 1), -(2**63)), ("sub.s16", (-32768, 1), 32767), ("sub.s32", (3, 5), -2),
    ("sub.s64", (LEAST, 1), -(2**31) - 1), ("mul.lo.s16", (300, 300), 24464),
    ("mul.lo.s32", (2**16, 2**16 + 3), 3 << 16), ("mul.lo.s64", (BIG, 2**24 + 1), BIG),
    ("mul.hi.u16", (65535, 65535), 65534), ("mul.hi.u32", (2**31, 6), 3), ("mul.hi.s32", (-1, 1), -1),
    ("mul.wide.u16", (65535, 65535), 4294836225), ("mul.wide.u32", (2**32 - 1, 2), 2**33 - 2),
    ("mul.wide.s32", (LEAST, 4), -(2**33)), ("mad.lo.s32", (MOST, 2, 5), 3), ("mad.lo.s64", (-3, 5, 7), -8),
    ("mad.wide.u32", (2**31, 4, BIG), BIG + 2**33), ("mad.wide.s32", (-2, 8, 10), -6), ("div.s32", (-7, 2), -3),
    ("div.s32", (LEAST, 7), -306783378), ("div.s64", (-(2**62), 3), -1537228672809129301),
    ("div.u32", (2**32 - 1, 10), 429496729), ("rem.s32", (-7, 2), -1), ("rem.u32", (2**32 - 1, 10), 5),
    ("bfi.b32", (0x1AB, 2**32 - 1, 4, 8), 0xFFFFFABF), ("bfi.b32", (7, 8, 0, 0), 8),
    ("neg.s32", (5,), -5), ("min.s32", (-1, 1), -1), ("max.s32", (-1, 1), 1), ("min.s64", (-BIG, 1), -BIG),
    ("max.s64", (-BIG, 1), 1), ("and.b16", (12, 10), 8),
    ("and.b32", (12, 10), 8), ("and.b64", (BIG + 1, BIG), BIG), ("and.pred", (1, 0), 0), ("or.b16", (12, 10), 14),
    ("or.b32", (12, 10), 14), ("or.b64", (BIG, 1), BIG + 1), ("or.pred", (1, 0), 1), ("xor.b32", (12, 10), 6),
    ("xor.pred", (1, 1), 0), ("not.pred", (1,), 0), ("shl.b16", (0xFFFF, 4), 0xFFF0), ("shl.b32", (1, 31), 2**31),
    ("shl.b32", (1, 32), 0), ("shl.b64", (3, 62), 3 << 62), ("shr.u16", (0x8000, 15), 1), ("shr.u32", (2**31, 31), 1),
    ("shr.u32", (2**31, 77), 0), ("shr.u64", (BIG, 39), 2), ("shr.s32", (-8, 1), -4), ("shr.s32", (-8, 99), -1),
    ("shr.s64", (-BIG, 38), -4), ("shf.l.wrap.b32", (0x80000000, 0x1, 33), 0x3), ("bfe.u32", (0xABCD, 4, 8), 0xBC),
    ("bfe.s32", (0xF0, 4, 4), -1), ("prmt.b32", (0x33221100, 0x77665544, 0x7041), 0x77004411),
    ("selp.b16", (3, 4, 1), 3), ("selp.b32", (3, 4, 0), 4), ("selp.b64", (BIG, 4, 1), BIG),
    ("selp.f32", (1.5, -0.0, 0), -0.0), ("add.rn.f32", (1.0, 2.0**-24), 1.0),
    ("add.rn.f32", (1.0, 3 * 2.0**-24), 1 + 2.0**-22), ("sub.rn.f32", (TINY, -TINY), 2 * TINY),
    ("mul.rn.f32", (1 + 2.0**-23, 1 + 2.0**-23), 1 + 2.0**-22), ("mul.rn.f32", (2.0**-140, 2.0**-9), TINY),
    ("mul.rn.ftz.f32", (2.0**-127, 2.0**20), 0.0), ("mul.rn.ftz.f32", (-(2.0**-100), 2.0**-40), -0.0),
    ("mul.rn.f64", (3.0, 0.1), 0.30000000000000004), ("div.rn.f64", (1.0, 3.0), 1 / 3), ("neg.f32", (0.0,), -0.0),
    ("abs.ftz.f32", (-2.5,), 2.5), ("fma.rn.ftz.f32", (1 + 2.0**-23, 1 - 2.0**-23, -1.0), -(2.0**-46)),
    ("fma.rn.ftz.f32", (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60), 1 + 2.0**-11 + 2.0**-23),
    ("add.rn.f32x2", ((1.0, 2.0), (3.0, -5.0)), (4.0, -3.0)), ("sub.rn.f32x2", ((1.0, 2.0), (3.0, -5.0)), (-2.0, 7.0)),
    ("mul.rn.f32x2", ((1.0, 2.0), (3.0, -5.0)), (3.0, -10.0)), ("add.rn.f32.f16", (0.5, 2.0**-20), 0.5 + 2.0**-20),
    ("add.rn.f32.bf16", (0.5, 2.0**-20), 0.5 + 2.0**-20), ("sub.rn.f32.f16", (0.5, 2.0), -1.5),
    ("sub.rn.f32.bf16", (0.5, 2.0), -1.5), ("rsqrt.approx.ftz.f32", (0.25,), 2.0),
    ("rsqrt.approx.ftz.f32", (TINY,), inf), ("setp.eq.b16", (-1, 0xFFFF), 1), ("setp.eq.b32", (7, 8), 0),
    ("setp.eq.b64", (BIG, 0), 0), ("setp.ne.b16", (1, 2), 1), ("setp.ne.b32", (-1, 2**32 - 1), 0),
    ("setp.ne.b64", (BIG, 0), 1), ("setp.neu.f32", (nan, 1.0), 1), ("setp.neu.f32", (0.0, -0.0), 0),
    ("setp.lt.s32", (-1, 0), 1), ("setp.lt.u32", (-1, 0), 0), ("setp.lt.s64", (-BIG, 0), 1), ("setp.le.s32", (3, 3), 1),
    ("setp.le.s64", (1, 0), 0), ("setp.gt.s32", (-1, 0), 0), ("setp.gt.u32", (-1, 0), 1), ("setp.gt.s64", (BIG, 0), 1),
    ("setp.ge.s32", (3, 3), 1), ("setp.ltu.f32", (nan, 1.0), 1), ("setp.ltu.f32", (1.0, 1.0), 0),
    *((f"cvt.{to}.{of}", (3,), 3) for to in ("s64", "u16", "u32", "u64") for of in ("s32", "u16", "u32", "u64")),
    ("cvt.s64.s32", (-5,), -5), ("cvt.u64.u32", (-5,), 2**32 - 5), ("cvt.u16.u32", (0x12345,), 0x2345),
    ("cvt.rn.f32.s32", (2**24 + 1,), 2.0**24), ("cvt.rn.f32.s64", (-BIG - 1,), -(2.0**40)),
    ("cvt.rn.f32.f64", (1 / 3,), 11184811 / 2**25), ("cvt.rn.f64.s64", (2**53 + 1,), 2.0**53),
    ("cvt.f32.f16", (2.0**-24,), 2.0**-24), ("cvt.f32.bf16", (-1.5,), -1.5), ("cvt.rni.ftz.s32.f32", (2.5,), 2),
    ("cvt.rni.ftz.s32.f32", (-1e20,), LEAST), ("cvt.rni.ftz.s32.f32", (nan,), 0),
    ("cvt.rn.bf16.f32", (1 + 2.0**-8,), 0x3F80), ("cvt.rn.bf16.f32", (1 + 3 * 2.0**-8,), 0x3F82),
    ("cvt.rn.bf16.f32", (nan,), 0x7FFF), ("cvt.rn.f16.f32", (1 + 2.0**-11,), 0x3C00),
    ("cvt.rn.f16.f32", (65520.0,), 0x7C00), ("cvt.rn.f16.f32", (-nan,), 0x7FFF),
    ("cvt.rn.bf16x2.f32", (1.0, -2.0), 0x3F80C000), ("cvt.rn.f16x2.f32", (1.0, -2.0), 0x3C00C000),
]  # fmt: skip
"""Opcodes, operands and results: numbers of their types, or bits of types "b"."""

FLOATS: dict[str, Any] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def bits(value: Any, kind: str) -> int:
    if kind == "f32x2":
        return bits(value[0], "f32") | bits(value[1], "f32") << 32
    if kind == "bf16":
        return bits(value, "f32") >> 16
    if kind in FLOATS:
        return int.from_bytes(FLOATS[kind](value).tobytes(), "little")
    return int(value) % (2 if kind == "pred" else 1 << 8 * BYTES[kind])


def register(kind: str, number: int) -> str:
    return "%" + ("p" if kind == "pred" else {2: "rs", 4: "r", 8: "rd"}[BYTES[kind]]) + str(number)


@pytest.mark.parametrize(("opcode", "operands", "result"), COMPUTED)
def test_each_instruction_computes_the_result_in_the_manual(
    opcode: str, operands: tuple[Any, ...], result: Any
) -> None:
    operation, lines, names = OPERATIONS[opcode], [], []
    for number, (value, kind) in enumerate(zip(operands, operation.operands, strict=True), 4):
        names.append(register(kind, number))
        lines.append(f"mov.{'pred' if kind == 'pred' else f'b{8 * BYTES[kind]}'} {names[-1]}, {bits(value, kind)};")
    target, width = register(operation.result, 8), 8 * BYTES[operation.result]
    lines.append(f"{opcode} {target}, {', '.join(names)};")
    if operation.result == "pred":
        target, width = "%r8", 32
        lines.append("selp.b32 %r8, 1, 0, %p8;")
    out = zeros()
    run("\n".join([*lines, f"st.global.b{width} [%rd2], {target};"]), out)
    assert [x % 2**64 for x in out.tolist()] == [bits(result, operation.result)] * 32


def test_every_opcode_that_computes_is_tested() -> None:
    assert {opcode for opcode, _, _ in COMPUTED} == OPERATIONS.keys()


T = torch.arange(32)
MOVED: dict[str, tuple[str, Tensor]] = {
    "parameters, extended by their sign": ("ld.param.s32 %rd4, [number]; st.global.b64 [%rd2], %rd4;", T * 0 - 5),
    "parts of a register": (
        "mov.b64 %rd4, {{%r1, %r2}}; mov.b64 {{%r5, _}}, %rd4; mov.b32 %r6, {{%rs1, %rs2}};"
        "st.global.v2.b32 [%rd2], {{%r5, %r2}};",
        T + (8 * T << 32),
    ),
    "a predicate": ("mov.pred %p1, -1; @%p1 st.global.b64 [%rd2], 3; @!%p1 st.global.b64 [%rd2], 4;", T * 0 + 3),
    "a branch": (
        "setp.lt.s32 %p1, %r1, 9; mov.b32 %r5, 1; @%p1 bra $L_1; mov.b32 %r5, 2; bra.uni $L_1; mov.b32 %r5, 3;"
        "\n$L_1: st.global.b32 [%rd2], %r5;",
        torch.where(T < 9, 1, 2),
    ),
    "a loop": (
        "mov.b32 %r5, 0;\n$L_1: add.s32 %r5, %r5, 1; setp.lt.s32 %p1, %r5, %r1; @%p1 bra $L_1;"
        "st.global.b32 [%rd2], %r5;",
        T.clamp_min(1),
    ),
    "a carry": (
        "mad.lo.cc.u32 %r5, -1, %r1, -1; madc.hi.u32 %r6, -1, %r1, 0; st.global.v2.b32 [%rd2], {{%r5, %r6}};",
        (2**32 - 1) * (T + 1),
    ),
    "shared memory": (
        "st.shared.v2.b32 [%r2], {{%r1, %r2}}; st.shared.b8 [%r2+1], %r1; bar.sync 0; ld.shared.b64 %rd4, [%r2];"
        "st.global.b64 [%rd2], %rd4;",
        T + 256 * T + (8 * T << 32),
    ),
    "local memory and constants": (
        "mov.b64 %rd4, table; ld.global.nc.b32 %r5, [%rd4+4]; mov.b32 %r6, __local_depot0; st.local.b32 [%r6+4], %r5;"
        "ld.local.b32 %r7, [%r6+4]; st.global.b32 [%rd2], %r7;",
        T * 0 + 2**32 - 1,
    ),
    "a shuffle by exchange": ("shfl.sync.bfly.b32 %r5, %r1, 5, 31, -1; st.global.b32 [%rd2], %r5;", T ^ 5),
    "a shuffle by index": ("shfl.sync.idx.b32 %r5, %r2, %r2, 31, -1; st.global.b32 [%rd2], %r5;", 8 * (8 * T % 32)),
    "a sum": ("bar.warp.sync -1; redux.sync.add.s32 %r5, %r1, -1; st.global.b32 [%rd2], %r5;", T * 0 + 496),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_data_and_threads_move(name: str) -> None:
    body, want = MOVED[name]
    out = zeros()
    run(body.format(), out, number=2**32 - 5)
    assert out.tolist() == want.tolist()


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_stored_and_loaded_by_rows(transposed: bool) -> None:
    """Thread t holds the elements (t div 4, 2·(t mod 4)) and the next; here, an element is 8·row + column."""
    body = """
        shl.b32 %r5, %r1, 4; shl.b32 %r6, %r1, 1; add.s32 %r7, %r6, 1; shl.b32 %r7, %r7, 16; or.b32 %r8, %r6, %r7;
        add.s32 %r9, %r8, 0x400040; stmatrix.sync.aligned.m8n8.x2{0}.shared.b16 [%r5], {{%r8, %r9}}; bar.sync 0;
        ld.shared.b64 %rd4, [%r2]; st.global.b64 [%rd2], %rd4; add.s64 %rd5, %rd3, %rd1;
        ldmatrix.sync.aligned.m8n8.x2{0}.shared.b16 {{%r11, %r12}}, [%r5]; st.global.v2.b32 [%rd5], {{%r11, %r12}};
    """
    out, other = zeros(), zeros()
    run(body.format(".trans" if transposed else ""), out, other)
    elements = torch.arange(64).view(8, 8)
    both = torch.stack([elements, elements + 64])
    stored = both.mT if transposed else both
    assert torch.equal(out.view(torch.int16).view(2, 8, 8).long(), stored)
    pairs = both.flatten(1).view(2, 32, 2).transpose(0, 1)
    assert torch.equal(other.view(torch.int16).view(32, 2, 2).long(), pairs)


FAULTS: dict[str, tuple[str, dict[str, int]]] = {
    "unknown instruction": ("ex2.approx.f32 %r5, %r1;", {}),
    "outside: 8 bytes at byte 256": ("st.global.b64 [%rd2+8], %rd1;", {}),
    "outside:": ("add.s64 %rd2, %rd2, -8; st.global.b64 [%rd2], %rd1;", {}),
    "outside: 4 bytes at byte 2048 of 2048": ("st.shared.b32 [%r2+1800], %r1;", {}),
    "misaligned: 16 bytes": ("st.global.v4.b32 [%rd2], {%r1, %r1, %r1, %r1};", {}),
    "outside: 4 bytes at byte 8 of 8 of local": ("st.local.b32 [__local_depot0+8], %r1;", {}),
    "read before it was written": ("ld.shared.b32 %r5, [%r2];", {}),
    "race: a warp reads what another warp wrote":
        ("st.shared.b32 [%r2], %r1; xor.b32 %r5, %r2, 256; ld.shared.b32 %r6, [%r5];", {"threads": 64}),
    "race: a warp writes what another warp read": (
        "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r6, [%r2]; xor.b32 %r5, %r2, 256;"
        "st.shared.b32 [%r5], %r1;", {"threads": 64},
    ),
    "race: a warp writes what another warp wrote":
        ("st.shared.b32 [%r2], %r1; xor.b32 %r5, %r2, 256; st.shared.b32 [%r5], %r1;", {"threads": 64}),
    "race: a warp writes what another warp read since": (  # both warps read it
        "st.shared.b32 [%r2], %r1; bar.sync 0; setp.lt.s32 %p1, %r1, 32; setp.eq.b32 %p2, %r1, 32;"
        "@%p1 ld.shared.b32 %r6, [0]; @!%p1 ld.shared.b32 %r6, [0]; @%p2 st.shared.b32 [0], %r1;", {"threads": 64},
    ),
    "race: threads write to one address": ("st.shared.b32 [0], %r1;", {}),
    "race: a block writes what another block wrote": ("mov.b64 %rd5, 3; st.global.b64 [%rd2], %rd5;", {"blocks": 2}),
    "race: a block writes what another block read": (
        "mov.u32 %r5, %ctaid.x; setp.eq.b32 %p1, %r5, 0;"
        "@%p1 ld.global.b64 %rd5, [%rd2]; @!%p1 st.global.b64 [%rd2], 3;", {"blocks": 2},
    ),
    "wait at different barriers": ("setp.lt.s32 %p1, %r1, 9; @%p1 ret; bar.sync 0;", {}),
    "executed by a part of a warp": ("setp.lt.s32 %p1, %r1, 9; @%p1 shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;", {}),
    "does not end": ("$L_1: bra $L_1;", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST_STEPS", 1000)
    body, options = FAULTS[name]
    with pytest.raises(Fault, match=name):
        run(body, zeros(32), **options)


def test_only_the_elements_of_views_are_inside() -> None:
    """Storage around and between the elements of a view belongs to no tensor."""
    whole = zeros(70)
    run("ld.global.b64 %rd5, [%rd2];", whole[3:35])
    for view in (whole[3:34], whole[3:67:2]):
        with pytest.raises(Fault, match="belongs to no tensor"):
            run("ld.global.b64 %rd5, [%rd2];", view)
