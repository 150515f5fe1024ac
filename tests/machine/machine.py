"""Run a kernel as a GPU does: the threads of many blocks at once, as elements of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
from accesses import Fault, Memory, Span, scratch, stamp
from numpy.typing import NDArray
from operations import DTYPES, OPERATIONS, Array, spelled
from ptx import BYTES, Address, Instruction, Operand, Program
from torch import Tensor

WARP = 32
MOST_STEPS = 1_000_000
"""Stretches of code after which a loop counts as endless."""

MOST_THREADS = 1 << 13
"""Threads that run at once; more take more memory and hardly less time."""

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
GARBAGE = 0xFFC1FFC1FFC1FFC1
"""What a register holds in threads that have not written it: NaN in every type of floating point."""

Active = NDArray[np.bool_]
STEPS: dict[str, Callable[[Blocks, Instruction, Active], None]] = {}
"""What opcodes do that are more than a function of registers."""


def step(patterns: str) -> Callable[[Any], Any]:
    """Register a method of Blocks as the one that executes opcodes."""

    def register(method: Any) -> Any:
        STEPS.update(dict.fromkeys(spelled(patterns), method))
        return method

    return register


def run(
    program: Program, grid: tuple[int, int, int], shared: int, parameters: Mapping[str, int], tensors: Iterable[Tensor]
) -> None:
    """Run all blocks of a launch.

    Args:
        program: the kernel.
        grid: number of blocks in x, y and z.
        shared: bytes of shared memory per block.
        parameters: the bits of each parameter.
        tensors: all that the launch may access.
    """
    memory = Memory([*tensors, *program.constants.values()])
    indices = np.array([*product(*map(range, reversed(grid)))], np.uint32)[:, ::-1]
    size = max(1, MOST_THREADS // program.threads)
    for first in range(0, len(indices), size):
        Blocks(program, grid, indices[first : first + size], shared, parameters, memory).run()


class Blocks:
    """The threads of some blocks, with their registers, which hold bits, and their shared and local memory.

    A step executes the code from the lowest instruction that any thread has reached to the next branch, barrier or
    label, in all threads that have reached it, so that branches join again as early as possible.
    """

    def __init__(
        self, program: Program, grid: tuple[int, ...], indices: NDArray[np.uint32], shared: int,
        parameters: Mapping[str, int], memory: Memory,
    ) -> None:  # fmt: skip
        self.program, self.parameters, self.shared = program, parameters, shared
        count, (x, y, z) = len(indices), indices.T.astype(np.int64)
        self.threads = np.arange(count * program.threads)
        self.block = self.threads // program.threads
        self.number, self.epoch = x + grid[0] * (y + grid[1] * z), np.zeros(count, np.int64)
        self.spaces: dict[str, Span | Memory] = {"global": memory, "shared": scratch(shared * count)}
        self.spaces["local"] = scratch(program.local * len(self.threads))
        symbols = {"global_smem": 0, "__local_depot0": 0, **{n: x.data_ptr() for n, x in program.constants.items()}}
        self.symbols = symbols | {f"%nctaid.{axis}": grid[i] for i, axis in enumerate("xyz")}
        self.registers: dict[str, Array] = {"%tid.x": (self.threads % program.threads).astype(np.uint32)}
        self.registers |= {f"%ctaid.{axis}": indices[self.block, i] for i, axis in enumerate("xyz")}
        self.numbers: dict[tuple[str, str], Array] = {}
        self.carry = np.zeros(len(self.threads), np.uint64)
        self.at = np.zeros(len(self.threads), np.int64)
        self.waiting = np.zeros(len(self.threads), np.bool_)

    def run(self) -> None:
        """Execute the program to its end in all threads."""
        code, ends = self.program.code, self.program.ends
        for _ in range(MOST_STEPS):
            live = self.at < len(code)
            ready = live & ~self.waiting
            if ready.any():
                number = self.at[ready].min()
                active = ready & (self.at == number)
                self.at[active] = ends[number]
                for instruction in code[number : ends[number]]:
                    self._execute(instruction, active)
            elif live.any():
                self._pass_barrier()
            else:
                return
        raise Fault(f"{self.program.name} does not end")

    def _execute(self, instruction: Instruction, active: Active) -> None:
        opcode = instruction.opcode
        try:
            if instruction.guard:
                active = active & (self.value(instruction.guard, "pred") != instruction.negated)
                if not active.any():
                    return
            if opcode in STEPS:
                STEPS[opcode](self, instruction, active)
            elif opcode in OPERATIONS:
                target: Any = instruction.operands[0]
                values = [*map(self.value, instruction.operands[1:], OPERATIONS[opcode].operands)]
                if not active.all():  # the registers of other threads may hold what an operation refuses
                    values = [x[active] for x in values]
                with np.errstate(all="ignore"):
                    result = OPERATIONS[opcode].compute(*values)
                self._register(target)[active] = self._bits(result, target)
            else:
                raise Fault("unknown instruction")
        except Fault as fault:
            raise Fault(f"{fault}, in `{instruction.text}` of {self.program.name}") from None

    # Registers.

    def _width(self, name: str) -> int:
        return self.program.registers[name.rstrip("0123456789")]

    def _register(self, name: str) -> Array:
        if name not in self.registers:
            width = self._width(name)
            garbage = GARBAGE & (1 << 8 * width) - 1 if width > 1 else 1
            self.registers[name] = np.full(len(self.threads), garbage, BITS[width])
        return self.registers[name]

    def value(self, operand: Any, kind: str) -> Array:
        """Return a register, symbol or number as an array of a type, with one element per thread."""
        if operand[0] == "%" and operand not in self.symbols:
            return self._as(self._register(operand), kind, operand)
        if (operand, kind) not in self.numbers:
            if operand in self.symbols:
                number = self.symbols[operand]
            else:
                number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)
            bits = np.full(len(self.threads), number & (1 << 8 * BYTES[kind]) - 1, BITS[BYTES[kind]])
            self.numbers[operand, kind] = self._as(bits, kind, operand)
        return self.numbers[operand, kind]

    @staticmethod
    def _as(bits: Array, kind: str, operand: str) -> Array:
        if bits.itemsize != BYTES[kind]:
            raise Fault(f"{operand} has {bits.itemsize} bytes, and {kind} has {BYTES[kind]}")
        if kind == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(DTYPES[kind]).reshape(len(bits), 2) if kind == "f32x2" else bits.view(DTYPES[kind])

    def write(self, name: Any, values: Array, active: Active) -> None:
        """Write one value per thread to a register, in the active threads."""
        if name != "_":
            np.copyto(self._register(name), self._bits(values, name), where=active)

    def _bits(self, values: Array, name: str) -> Array:
        return np.ascontiguousarray(values).view(BITS[self._width(name)]).reshape(-1)

    @step("mov.{pred,b16,u16,b32,u32,b64,u64}")
    def _move(self, instruction: Instruction, active: Active) -> None:
        """Copy a value, or pack registers into a wider one or split it; the first has the lowest bits."""
        target, source = instruction.operands
        kind = instruction.opcode.rpartition(".")[2]
        if isinstance(source, tuple):
            part = f"b{8 * BYTES[kind] // len(source)}"
            self.write(target, np.stack([self.value(x, part) for x in source], 1), active)
        elif isinstance(target, tuple):
            parts = self.value(source, kind).view(BITS[BYTES[kind] // len(target)]).reshape(-1, len(target))
            for register, values in zip(target, parts.T, strict=True):
                self.write(register, values, active)
        else:
            self.write(target, self.value(source, kind), active)

    @step("mad.lo.cc.u32 madc.hi.u32")
    def _multiply_with_carry(self, instruction: Instruction, active: Active) -> None:
        """Multiply and add the low half of a product and keep the carry, or add the carry to the high half."""
        target, *operands = instruction.operands
        a, b, c = (self.value(x, "u32").astype(np.uint64) for x in operands)
        if instruction.opcode == "mad.lo.cc.u32":
            total = (a * b & 0xFFFFFFFF) + c
            np.copyto(self.carry, total >> 32, where=active)
        else:
            total = (a * b >> 32) + c + self.carry
        self.write(target, total.astype(np.uint32), active)

    # Control flow.

    @step("bra{,.uni}")
    def _branch(self, instruction: Instruction, active: Active) -> None:
        if instruction.opcode == "bra.uni" and instruction.guard:
            raise Fault("unknown branch")
        self.at[active] = self.program.labels[str(instruction.operands[0])]

    @step("ret")
    def _return(self, instruction: Instruction, active: Active) -> None:
        self.at[active] = len(self.program.code)

    @step("bar.sync")
    def _wait(self, instruction: Instruction, active: Active) -> None:
        if instruction.operands != ("0",):
            raise Fault("unknown barrier")
        self.waiting |= active

    def _pass_barrier(self) -> None:
        places = self.at.reshape(-1, self.program.threads)
        if (places != places[:, :1]).any():
            raise Fault(f"threads of {self.program.name} wait at different barriers, or have ended")
        self.epoch[self.waiting.reshape(places.shape)[:, 0]] += 1
        self.waiting[:] = False

    @step("bar.warp.sync")
    def _wait_for_warp(self, instruction: Instruction, active: Active) -> None:
        self._whole_warps(active, instruction.operands[0])

    def _whole_warps(self, active: Active, members: Operand = "-1") -> Array:
        """Return the threads of each active warp; raise Fault if a part of a warp is active or a member."""
        warps = active.reshape(-1, WARP)
        if (warps.any(1) != warps.all(1)).any() or (self.value(members, "s32")[active] != -1).any():
            raise Fault("executed by a part of a warp")
        return self.threads.reshape(-1, WARP)[warps.all(1)]

    # Memory.

    @step("ld.param.{b32,b64,s32}")
    def _load_parameter(self, instruction: Instruction, active: Active) -> None:
        target, source = instruction.operands
        kind = instruction.opcode.rpartition(".")[2]
        if not isinstance(source, Address) or source.offset or BYTES[kind] != self.program.parameters[source.base]:
            raise Fault("unknown access to a parameter")
        bits = np.full(len(self.threads), self.parameters[source.base], BITS[BYTES[kind]])
        self._write_loaded(target, bits.view(DTYPES[kind]), active)

    def _write_loaded(self, register: Any, values: Array, active: Active) -> None:
        """Write loaded numbers, extended to the width of the register."""
        self.write(register, values.astype(np.dtype(f"{values.dtype.kind}{self._width(register)}")), active)

    @step(
        "{ld,st}.global{,.v2,.v4}.{b16,b32,b64} {ld,st}.shared{,.v2,.v4}.{b8,b16,b32,b64}"
        " {ld,st}.local.b32 ld.global.nc.b32"
    )
    def _access(self, instruction: Instruction, active: Active) -> None:
        """Load or store one register, or two or four at once as a vector that must be aligned to its width."""
        name, space, *vector, kind = instruction.opcode.split(".")
        address, data = instruction.operands if name == "st" else reversed(instruction.operands)
        registers: Any = data if isinstance(data, tuple) else (data,)
        mine = np.flatnonzero(active)
        if len(registers) != {"v2": 2, "v4": 4}.get("".join(vector), 1):
            raise Fault("unknown vector")
        values = None
        if name == "st":  # the low bits of a register, which may be wider
            columns = [self.value(x, f"b{8 * self._width(x)}" if x[0] == "%" else kind) for x in registers]
            values = np.stack(columns, 1).astype(DTYPES[kind])[mine].view(np.uint8)
        width = BYTES[kind] * len(registers)
        loaded = self._bytes(space, self._addresses(address, space)[mine], width, mine, values)
        if name == "ld":
            for register, column in zip(registers, loaded.view(DTYPES[kind]).T, strict=True):
                whole: Array = np.zeros(len(self.threads), DTYPES[kind])
                whole[mine] = column
                self._write_loaded(register, whole, active)

    def _addresses(self, operand: Any, space: str) -> NDArray[np.int64]:
        return self.value(operand.base, "b64" if space == "global" else "b32").astype(np.int64) + operand.offset

    def _bytes(self, space: str, address: Array, width: int, threads: Array, values: Array | None = None) -> Array:
        """Load or store ``width`` bytes per thread in a space."""
        if space != "global":
            size, owner = (self.program.local, threads) if space == "local" else (self.shared, self.block[threads])
            if (wrong := (address < 0) | (address + width > size)).any():
                raise Fault(f"outside: {width} bytes at byte {int(address[wrong][0])} of {size} of {space} memory")
            address = address + owner * size
        block = self.block[threads]
        who = stamp(self.number[block], self.epoch[block], threads % self.program.threads // WARP)
        return self.spaces[space].access(address, width, who, values)

    @step("{ld,st}matrix.sync.aligned.m8n8{.x1,.x2,.x4}{,.trans}.shared.b16")
    def _matrices(self, instruction: Instruction, active: Active) -> None:
        """Load or store 8 × 8 matrices of 16 bits.

        Threads 8·m to 8·m + 7 of a warp give the addresses of the rows of matrix m. Thread t holds the elements
        (t div 4, 2·(t mod 4)) and the one on its right; of a transposed matrix, the elements at the mirrored places.
        """
        storing = instruction.opcode.startswith("st")
        address, registers = instruction.operands if storing else reversed(instruction.operands)
        starts = self._addresses(address, "shared")
        row, column = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
        for threads, (matrix, register) in product(self._whole_warps(active), enumerate(registers)):
            if (starts[threads] % 16).any():
                raise Fault("misaligned: a row of 16 bytes")
            halves, rows = np.zeros((len(self.threads), 2), np.uint16), starts[threads[8 * matrix :][:8]]
            if storing:
                halves[:] = self.value(register, "b32").view(np.uint16).reshape(-1, 2)
            for half in range(2):
                r, c = (column + half, row) if ".trans" in instruction.opcode else (row, column + half)
                part = np.ascontiguousarray(halves[threads, half])[:, None].view(np.uint8) if storing else None
                halves[threads, half] = self._bytes("shared", rows[r] + 2 * c, 2, threads, part).view(np.uint16)[:, 0]
            if not storing:
                self.write(register, halves, np.isin(self.threads, threads))

    # Exchange within a warp.

    @step("shfl.sync.{bfly,idx}.b32")
    def _shuffle(self, instruction: Instruction, active: Active) -> None:
        target, source, number, clamp, members = instruction.operands
        if clamp != "31":
            raise Fault("unknown shuffle")
        self._whole_warps(active, members)
        operand = self.value(number, "b32") % WARP
        lanes = operand if ".idx" in instruction.opcode else self.threads % WARP ^ operand
        self.write(target, self.value(source, "b32")[self.threads // WARP * WARP + lanes], active)

    @step("redux.sync.add.s32")
    def _sum_of_warp(self, instruction: Instruction, active: Active) -> None:
        target, source, members = instruction.operands
        self._whole_warps(active, members)
        sums = self.value(source, "s32").reshape(-1, WARP).sum(1, dtype=np.int32)
        self.write(target, np.repeat(sums, WARP), active)
