"""Run a kernel as a GPU does: blocks one after another, each with all its threads at once as elements of arrays."""

from __future__ import annotations

from collections import Counter
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
"""Steps of a block after which a loop counts as endless."""

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
GARBAGE = 0xFFC1FFC1FFC1FFC1
"""What a register holds in threads that have not written it: NaN in every type of floating point."""

executed: Counter[str] = Counter()
"""How often each opcode has run in this process."""

Active = NDArray[np.bool_]
STEPS: dict[str, Callable[[Block, Instruction, Active], None]] = {}
"""What opcodes do that are more than a function of registers."""


def step(patterns: str) -> Callable[[Any], Any]:
    """Register a method of Block as the one that executes opcodes."""

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
    for z, y, x in product(*map(range, reversed(grid))):
        Block(program, grid, (x, y, z), shared, parameters, memory).run()


class Block:
    """The threads of one block, with their registers, which hold bits, and their shared and local memory.

    A step executes the instruction with the lowest number that any thread has reached, in all threads that have reached
    it, so that branches join again as early as possible.
    """

    def __init__(
        self, program: Program, grid: tuple[int, ...], index: tuple[int, ...], shared: int,
        parameters: Mapping[str, int], memory: Memory,
    ) -> None:  # fmt: skip
        self.program, self.parameters = program, parameters
        self.threads = np.arange(program.threads)
        self.number, self.epoch = index[0] + grid[0] * (index[1] + grid[1] * index[2]), 0
        self.spaces: dict[str, Span | Memory] = {"global": memory, "shared": scratch(shared)}
        self.spaces["local"] = scratch(program.local * program.threads)
        self.symbols = {"global_smem": 0, "__local_depot0": 0}
        self.symbols |= {name: table.data_ptr() for name, table in program.constants.items()}
        self.symbols |= {f"%ctaid.{axis}": index[i] for i, axis in enumerate("xyz")}
        self.symbols |= {f"%nctaid.{axis}": grid[i] for i, axis in enumerate("xyz")}
        self.registers: dict[str, Array] = {"%tid.x": self.threads.astype(np.uint32)}
        self.carry = np.zeros(program.threads, np.uint64)
        self.at = np.zeros(program.threads, np.int64)
        self.waiting = np.zeros(program.threads, np.bool_)

    def run(self) -> None:
        """Execute the program to its end in all threads."""
        code = self.program.code
        for _ in range(MOST_STEPS):
            live = self.at < len(code)
            ready = live & ~self.waiting
            if ready.any():
                number = self.at[ready].min()
                self._execute(code[number], ready & (self.at == number))
            elif live.any():
                self._pass_barrier()
            else:
                return
        raise Fault(f"{self.program.name} does not end")

    def _execute(self, instruction: Instruction, active: Active) -> None:
        opcode = instruction.opcode
        executed[opcode] += 1
        self.at[active] += 1
        if instruction.guard:
            active = active & (self.value(instruction.guard, "pred") != instruction.negated)
        try:
            if not active.any():
                pass
            elif opcode in STEPS:
                STEPS[opcode](self, instruction, active)
            elif opcode in OPERATIONS:
                target, *operands = instruction.operands
                values = map(self.value, operands, OPERATIONS[opcode].operands)
                with np.errstate(all="ignore"):
                    self.write(target, OPERATIONS[opcode].compute(*values), active)
            else:
                raise Fault("unknown instruction")
        except Fault as fault:
            raise Fault(f"{fault}, in `{instruction.text}` of {self.program.name}, block {self.number}") from None

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
        size = BYTES[kind]
        if operand in self.symbols:
            bits = np.full(len(self.threads), self.symbols[operand], BITS[size])
        elif operand.startswith("%"):
            bits = self._register(operand)
            if bits.itemsize != size:
                raise Fault(f"{operand} has {bits.itemsize} bytes, and {kind} has {size}")
        else:
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand.rstrip("U"), 0)
            bits = np.full(len(self.threads), number & (1 << 8 * size) - 1, BITS[size])
        if kind == "bf16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(DTYPES[kind]).reshape(len(bits), 2) if kind == "f32x2" else bits.view(DTYPES[kind])

    def write(self, name: Any, values: Array, active: Active) -> None:
        """Write one value per thread to a register, in the active threads."""
        if name != "_":
            target = self._register(name)
            np.copyto(target, np.ascontiguousarray(values).view(target.dtype).reshape(-1), where=active)

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
        if (self.at != self.at[0]).any():
            raise Fault(f"threads of {self.program.name} wait at different barriers, or have ended")
        self.waiting[:] = False
        self.epoch += 1

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
        if space == "local":
            if (address + width > self.program.local).any():
                raise Fault("outside: beyond the local memory of a thread")
            address = address + threads * self.program.local
        return self.spaces[space].access(address, width, stamp(self.number, self.epoch, threads // WARP), values)

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
