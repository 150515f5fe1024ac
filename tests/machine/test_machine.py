"""Small kernels by hand: what instructions compute, with numbers from their descriptions in the PTX manual, and faults."""

from __future__ import annotations

import re
from typing import Any

import machine
import numpy as np
import pytest
import torch
from accesses import Fault
from operations import OPERATIONS
from ptx import parse
from torch import Tensor

ENTRY = """
.version 8.8
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 data,
	.param .u64 .ptr .global .align 1 other,
	.param .u32 number
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd1, %r1, 4;
	ld.param.b64 %rd2, [data];
	ld.param.b64 %rd3, [other];
	add.s64 %rd4, %rd2, %rd1;
	add.s64 %rd5, %rd3, %rd1;
{body}
	ret;
}}
"""
"""A kernel in which thread t has t in %r1, and the addresses of the t-th words of two tensors in %rd4 and %rd5."""


def run(body: str, *tensors: Tensor, threads: int = 32, blocks: int = 1, number: int = 0) -> None:
    """Run a kernel; the tensors are its data and its other parameter."""
    program = parse(ENTRY.format(threads=threads, body=body))
    data, other = (x.data_ptr() for x in (*tensors, *tensors)[:2])
    machine.run(program, (blocks, 1, 1), 4096, {"data": data, "other": other, "number": number}, tensors)


def words(count: int = 32) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


# Instructions.

F = {"f32": (np.float32, np.uint32), "f64": (np.float64, np.uint64), "f16": (np.float16, np.uint16)}
REGISTERS = {"pred": "%p", "16": "%rs", "32": "%r", "64": "%rd", "32x2": "%rd", "16x2": "%r"}


def bits(value: Any, kind: str) -> int:
    """Return the bits of a number of a type; bfloat16 is given as the float32 that it abbreviates."""
    if kind == "bf16":
        return int(np.float32(value).view(np.uint32)) >> 16
    if kind == "f32x2":
        return bits(value[0], "f32") | bits(value[1], "f32") << 32
    if kind in F:
        return int(F[kind][0](value).view(F[kind][1]))
    return int(value) & (1 << (1 if kind == "pred" else int(kind[1:]))) - 1


def computed(opcode: str, *operands: Any) -> int:
    """Return the bits that an instruction computes from numbers of its types."""
    operation = OPERATIONS[opcode]
    block = machine.Block(parse(ENTRY.format(threads=32, body="")), (1, 1, 1), (0, 0, 0), 0, {}, None)
    everyone, names = np.ones(32, np.bool_), []
    for i, (value, kind) in enumerate(zip(operands, operation.operands, strict=True)):
        names.append(f"{REGISTERS[kind.lstrip('busf')] if kind != 'pred' else '%p'}{i + 1}")
        width = block.registers_width(names[-1])
        block.write(names[-1], np.full(32, bits(value, kind), machine.BITS[width]), everyone)
    return 0
