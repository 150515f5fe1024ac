"""Read a kernel in PTX, the assembly that Triton's compiler hands to ptxas, as its parameters and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BYTES = {
    "pred": 1, "b8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
}  # fmt: skip
"""Bytes of a value of each type."""


class Address(NamedTuple):
    """An operand in brackets: a register or a symbol, and a number of bytes to add."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address
"""A register, symbol or number; registers in braces; or an address."""


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        text: the instruction as it is written, for messages.
        opcode: its name with all modifiers, such as "ld.global.v4.b32".
        operands: its operands, the destination first.
        guard: the predicate register without which a thread skips the instruction; "" if there is none.
        negated: whether threads skip the instruction with the predicate instead.
    """

    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: str = ""
    negated: bool = False


@dataclass(frozen=True)
class Program:
    """The kernel of a module.

    Args:
        name: its name.
        parameters: the bytes of each parameter by name, in order.
        threads: threads per block that the kernel requires.
        registers: bytes of the registers of each prefix, such as "%rd".
        local: bytes of local memory of each thread.
        constants: tables of 32-bit numbers in global memory.
        code: the instructions.
        labels: the number of the instruction that follows each label.
    """

    name: str
    parameters: dict[str, int]
    threads: int
    registers: dict[str, int]
    local: int
    constants: dict[str, Tensor]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """Parse the only kernel of a module."""
    text = re.sub(r"//.*", "", text)
    (entry,) = re.finditer(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\n\{\n(.*?)\n\}", text, re.DOTALL)
    name, declared, directives, body = entry.groups()
    parameters = {name: BYTES[kind] for kind, name in re.findall(r"\.param\s+\.(\w+).*?(\w+)\s*(?:,|$)", declared, re.M)}
    (threads,) = re.findall(r"\.reqntid\s+(\d+)", directives)
    registers = {prefix: BYTES[kind] for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+(%[a-zA-Z]+)", body)}
    local = sum(map(int, re.findall(r"\.local\b.*?\[(\d+)\]", body)))
    body = re.sub(r"^\s*(?:\.loc\b.*|[{}])$", "", body, flags=re.MULTILINE)
    body = re.sub(r"^\s*\.(?:reg|local|pragma)\b.*?;", "", body, flags=re.MULTILINE)
    tables = re.findall(r"\.global\b.*?\.b32 (\w+)\[\d+\] = \{(.*?)\}", text)
    constants = {name: torch.tensor([*map(int, numbers.split(","))]).to(torch.uint32) for name, numbers in tables}
    code, labels = [], {}
    for statement in re.findall(r"\$\w+:|[^;:]+;", body):
        if statement.endswith(":"):
            labels[statement[:-1]] = len(code)
        else:
            code.append(instruction(statement))
    return Program(name, parameters, int(threads), registers, local, constants, tuple(code), labels)


def instruction(statement: str) -> Instruction:
    """Parse an instruction that ends with a semicolon."""
    text = " ".join(statement.split())
    parts = re.fullmatch(r"(?:@(!?)(%\w+) )?([a-z][\w.]*) ?(.*);", text)
    if parts is None:
        raise ValueError(f"cannot read `{text}`")
    negated, guard, opcode, operands = parts.groups()
    pieces = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", operands)
    return Instruction(text, opcode, tuple(map(_operand, pieces)), guard or "", negated == "!")


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(re.findall(r"[^\s,{}]+", text))
    if text.startswith("["):
        base, _, offset = text.strip("[] ").partition("+")
        return Address(base.strip(), int(offset or 0))
    return text
