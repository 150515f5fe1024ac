"""Read a kernel in PTX, the assembly that Triton's compiler hands to ptxas: its parameters and instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

BYTES = {"pred": 1, "bf16": 2, "f32x2": 8} | {f"{kind}{8 * n}": n for kind in "busf" for n in (1, 2, 4, 8)}
"""Bytes of a value of each type."""


class Address(NamedTuple):
    """An operand in brackets: a register or symbol, and the number of bytes to add."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address
"""A register, symbol or number; registers in braces; or an address."""


class Instruction(NamedTuple):
    """An instruction.

    Args:
        text: as written, for messages.
        opcode: the name with all modifiers, such as "ld.global.v4.b32".
        operands: the destination and the sources, or an address and what is stored there.
        guard: the predicate of the threads that execute it; "" if all do.
        negated: whether the others execute it instead.
    """

    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: str
    negated: bool


class Program(NamedTuple):
    """A kernel.

    Args:
        name: its name.
        parameters: bytes of each parameter, by name and in order.
        threads: threads per block.
        registers: bytes of the registers with each prefix, such as "%rd".
        local: bytes of local memory per thread.
        constants: tables of 32-bit numbers in global memory.
        code: the instructions.
        labels: the number of the instruction after each label.
        ends: for each instruction, the number of the instruction after the next branch, barrier or end, or of the next
            label.
    """

    name: str
    parameters: dict[str, int]
    threads: int
    registers: dict[str, int]
    local: int
    constants: dict[str, Tensor]
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    ends: tuple[int, ...]


def parse(text: str) -> Program:
    """Parse a module with one kernel."""
    text = re.sub(r"//.*", "", text)
    (entry,) = re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\n\{\n(.*?)\n\}", text, re.DOTALL)
    name, declared, directives, body = entry.groups()
    parameters = {
        name: BYTES[kind] for kind, name in re.findall(r"\.param\s+\.(\w+).*?(\w+)\s*(?:,|$)", declared, re.M)
    }
    (threads,) = re.findall(r"\.reqntid\s+(\d+)", directives)
    registers = {prefix: BYTES[kind] for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+(%[a-zA-Z]+)", body)}
    local = sum(map(int, re.findall(r"\.local\b.*?\[(\d+)\]", body)))
    tables = re.findall(r"\.global\b.*?\.b32 (\w+)\[\d+\] = \{(.*?)\}", text)
    constants = {name: torch.tensor([*map(int, numbers.split(","))]).to(torch.uint32) for name, numbers in tables}
    # What remains are instructions and labels, without directives and without the braces of scopes.
    body = re.sub(r"^\s*(?:\.loc\b.*|\.(?:reg|local|pragma)\b.*;|[{}])$", "", body, flags=re.MULTILINE)
    code, labels = list[Instruction](), dict[str, int]()
    for statement in re.findall(r"\$\w+:|[^;:]+;", body):
        if statement.endswith(":"):
            labels[statement[:-1]] = len(code)
        else:
            code.append(instruction(statement))
    joins = {i + 1 for i, x in enumerate(code) if x.opcode.split(".")[0] in ("bra", "ret", "bar")}
    joins |= {*labels.values(), len(code)}
    ends = tuple(min(join for join in joins if join > i) for i in range(len(code)))
    return Program(name, parameters, int(threads), registers, local, constants, tuple(code), labels, ends)


def instruction(statement: str) -> Instruction:
    """Parse an instruction that ends with a semicolon."""
    text = " ".join(statement.split())
    parts = re.fullmatch(r"(?:@(!?)(%\w+) )?([a-z][\w.]*) ?(.*);", text)
    if parts is None:
        raise ValueError(f"cannot read `{text}`")
    negated, guard, opcode, rest = parts.groups()
    operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
    return Instruction(text, opcode, tuple(map(_operand, operands)), guard or "", negated == "!")


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(re.findall(r"[^\s,{}]+", text))
    if text.startswith("["):
        base, _, offset = text.strip("[] ").partition("+")
        return Address(base.strip(), int(offset or 0))
    return text
