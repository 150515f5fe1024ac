"""Run a kernel as a GPU does: blocks one after another, each with all its threads at once as elements of arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from accesses import Fault, Memory, Shared, Span, stamp
from operations import DTYPES, OPERATIONS, Array, spelled
from ptx import BYTES, Address, Instruction, Operand, Program

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


def step(patterns: str) -> Callable[[Any], Any]:
    """Register a method of Block as the one that executes opcodes."""

    def register(method: Any) -> Any:
        STEPS.update({opcode: method for pattern in patterns.split() for opcode in spelled(pattern)})
        return method

    return register


def run(program: Program, grid: tuple[int, int, int], shared: int, parameters: Mapping[str, int], tensors: Iterable[Tensor]) -> None:
    """Run all blocks of a launch.

    Args:
        program: the kernel.
        grid: number of blocks in x, y and z.
        shared: bytes of shared memory per block.
        parameters: the bits of each parameter.
        tensors: the tensors of the launch, all that it may access.
    """
    memory = Memory([*tensors, *program.constants.values()])
    for z, y, x in product(*map(range, reversed(grid))):
        Block(program, grid, (x, y, z), shared, parameters, memory).run()


class Block:
    """The threads of one block, with their registers and shared memory.

    A step executes the instruction with the lowest number that any thread has reached, for all threads that have reached
    it, so that branches join again as early as possible. Registers hold bits; instructions say what they mean.
    """

    def __init__(
        self, program: Program, grid: tuple[int, ...], index: tuple[int, ...], shared: int,
        parameters: Mapping[str, int], memory: Memory,
    ) -> None:  # fmt: skip
        self.program, self.parameters, self.memory = program, parameters, memory
        self.threads = np.arange(program.threads)
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.epoch = 0
        self.shared = Shared(shared)
        self.local = Shared(program.local * program.threads)
        self.carry = np.zeros(program.threads, np.uint64)
        special = {f"%ctaid.{axis}": index[i] for i, axis in enumerate("xyz")}
        special |= {f"%nctaid.{axis}": grid[i] for i, axis in enumerate("xyz")}
        self.symbols = special | {"global_smem": 0, "__local_depot0": 0}
        self.symbols |= {name: table.data_ptr() for name, table in program.constants.items()}
        self.registers: dict[str, Array] = {"%tid.x": self.threads.astype(np.uint32)}
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
                self._pass_barrier(live)
            else:
                return
        raise Fault(f"{self.program.name} does not end")

    def _execute(self, instruction: Instruction, here: Active) -> None:
        active = here
        if instruction.guard:
            active = here & (self.value(instruction.guard, "pred") != instruction.negated)
        opcode = instruction.opcode
        executed[opcode] += 1
        self.at[here] += 1
        if not active.any():
            return
        try:
            with np.errstate(all="ignore"):
                if opcode in STEPS:
                    STEPS[opcode](self, instruction, active)
                else:
                    self._compute(instruction, active)
        except Fault as fault:
            place = f"`{instruction.text}` of {self.program.name}, block {self.number}"
            raise Fault(f"{fault}, in {place}") from None

    def _compute(self, instruction: Instruction, active: Active) -> None:
        operation = OPERATIONS.get(instruction.opcode)
        if operation is None:
            raise Fault("unknown instruction")
        target, *operands = instruction.operands
        values = [self.value(x, kind) for x, kind in zip(operands, operation.operands, strict=True)]
        self.write(target, operation.compute(*values), active)

    # Registers.

    def _width(self, register: str) -> int:
        return self.program.registers[register.rstrip("0123456789")]

    def _register(self, name: str) -> Array:
        if name not in self.registers:
            width = self._width(name)
            garbage = GARBAGE & (1 << 8 * width) - 1 if width > 1 else 1
            self.registers[name] = np.full(len(self.threads), garbage, BITS[width])
        return self.registers[name]

    def value(self, operand: Operand, kind: str) -> Array:
        """Return an operand as an array of a type, with one element per thread."""
        assert isinstance(operand, str), operand
        size = BYTES[kind]
        if operand.startswith("%") and operand not in self.symbols:
            bits = self._register(operand)
            if bits.itemsize != size:
                raise Fault(f"{operand} has {bits.itemsize} bytes, {kind} has {size}")
        else:
            bits = np.full(len(self.threads), self._number(operand) & (1 << 8 * size) - 1, BITS[size])
        if kind == "bf16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        values = bits.view(DTYPES[kind])
        return values.reshape(len(bits), -1) if kind == "f32x2" else values

    def _number(self, text: str) -> int:
        if text in self.symbols:
            return self.symbols[text]
        return int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0)

    def write(self, register: Operand, values: Array, active: Active) -> None:
        """Write one value per thread to a register, in the active threads."""
        assert isinstance(register, str), register
        if register == "_":
            return
        target = self._register(register)
        bits = np.ascontiguousarray(values).view(target.dtype).reshape(-1)
        np.copyto(target, bits, where=active)

    @step("mov.{pred,b16,u16,b32,u32,b64,u64,f32}")
    def _move(self, instruction: Instruction, active: Active) -> None:
        """Copy a value, or pack registers into a wider one or split it; the first has the lowest bits."""
        target, source = instruction.operands
        kind = instruction.opcode.rpartition(".")[2]
        if isinstance(source, tuple):
            part = f"b{8 * BYTES[kind] // len(source)}"
            self.write(target, np.stack([self.value(x, part) for x in source], 1), active)
        elif isinstance(target, tuple):
            whole = np.ascontiguousarray(self.value(source, kind))
            parts = whole.view(BITS[BYTES[kind] // len(target)]).reshape(len(whole), -1)
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
            total = (a * b & np.uint64(0xFFFFFFFF)) + c
            np.copyto(self.carry, total >> np.uint64(32), where=active)
        else:
            total = (a * b >> np.uint64(32)) + c + self.carry
        self.write(target, total.astype(np.uint32), active)

    # Control flow.

    @step("bra{,.uni}")
    def _branch(self, instruction: Instruction, active: Active) -> None:
        (label,) = instruction.operands
        assert isinstance(label, str), label
        if instruction.opcode == "bra.uni" and instruction.guard:
            raise Fault("unknown branch")
        self.at[active] = self.program.labels[label]

    @step("ret")
    def _return(self, instruction: Instruction, active: Active) -> None:
        self.at[active] = len(self.program.code)

    @step("bar.sync")
    def _wait(self, instruction: Instruction, active: Active) -> None:
        if instruction.operands != ("0",):
            raise Fault("unknown barrier")
        self.waiting |= active

    def _pass_barrier(self, live: Active) -> None:
        if (self.at[live] != self.at[live][0]).any() or not live.all():
            raise Fault(f"{self.program.name}: threads of block {self.number} wait at different barriers, or have ended")
        self.waiting[:] = False
        self.epoch += 1

    @step("bar.warp.sync")
    def _wait_for_warp(self, instruction: Instruction, active: Active) -> None:
        self._whole_warps(active, instruction.operands[0])

    def _whole_warps(self, active: Active, members: Operand = "-1") -> Array:
        """Return the threads of each active warp; raise Fault if a part of a warp is active or a member."""
        warps = active.reshape(-1, WARP)
        if (warps.any(1) & ~warps.all(1)).any() or (self.value(members, "s32")[active] != -1).any():
            raise Fault("executed by a part of a warp")
        return self.threads.reshape(-1, WARP)[warps.all(1)]

    # Memory.

    @step("ld.param.{b32,b64,f32,s32,u64,u32}")
    def _load_parameter(self, instruction: Instruction, active: Active) -> None:
        target, source = instruction.operands
        assert isinstance(source, Address), source
        kind = instruction.opcode.rpartition(".")[2]
        if source.offset or BYTES[kind] != self.program.parameters[source.base]:
            raise Fault("unknown access to a parameter")
        value = np.full(len(self.threads), self.parameters[source.base], BITS[BYTES[kind]])
        self._write_loaded(target, value, kind, active)

    def _write_loaded(self, register: Operand, bits: Array, kind: str, active: Active) -> None:
        """Write loaded values, extended to the width of the register by their sign if they have one."""
        width = self._width(str(register))
        wide = bits.view(DTYPES[kind]).astype(np.dtype(f"{'i' if kind[0] == 's' else 'u'}{width}"))
        self.write(register, bits if bits.itemsize == width else wide, active)

    @step("{ld,st}.{global,shared}{,.v2,.v4}.{b8,b16,b32,b64} {ld,st}.local.b32 ld.global.nc.b32")
    def _access(self, instruction: Instruction, active: Active) -> None:
        name, space, *_, kind = instruction.opcode.split(".")
        address, data = instruction.operands if name == "st" else reversed(instruction.operands)
        registers = data if isinstance(data, tuple) else (data,)
        many = int(instruction.opcode.split(".v")[1][0]) if ".v" in instruction.opcode else 1
        if len(registers) != many:
            raise Fault("the vector has another number of registers")
        size, mine = BYTES[kind], np.flatnonzero(active)
        values = None
        if name == "st":
            columns = np.stack([self._stored(x, kind) for x in registers], 1)[mine]
            values = columns.view(np.uint8).reshape(len(mine), -1)
        got = self._bytes(space, self._addresses(address, space)[mine], size * many, mine, values)
        if name == "ld":
            for register, column in zip(registers, got.view(BITS[size]).T, strict=True):
                whole = np.zeros(len(self.threads), BITS[size])
                whole[mine] = column
                self._write_loaded(register, whole, kind, active)

    def _stored(self, operand: str, kind: str) -> Array:
        """Return a value to store, the low bits of a register that may be wider."""
        width = self._width(operand) if operand.startswith("%") else BYTES[kind]
        return self.value(operand, f"b{8 * width}").astype(BITS[BYTES[kind]])

    def _addresses(self, operand: Operand, space: str) -> NDArray[np.int64]:
        assert isinstance(operand, Address), operand
        wide = space == "global" or operand.base.startswith("%") and self._width(operand.base) == 8
        return self.value(operand.base, "b64" if wide else "b32").astype(np.int64) + operand.offset

    def _bytes(self, space: str, address: Array, width: int, threads: Array, values: Array | None = None) -> Array:
        """Load or store ``width`` bytes per thread in a space."""
        who = stamp(self.number, self.epoch, threads // WARP)
        if space == "local":
            if (address + width > self.program.local).any():
                raise Fault("outside: beyond the local memory of a thread")
            address = address + threads * self.program.local
        memory: dict[str, Span | Memory] = {"shared": self.shared, "local": self.local, "global": self.memory}
        return memory[space].access(address, width, who, values)

    @step("{ld,st}matrix.sync.aligned.m8n8{.x1,.x2,.x4}{,.trans}.shared.b16")
    def _matrices(self, instruction: Instruction, active: Active) -> None:
        """Load or store 8 × 8 matrices of 16 bits.

        Threads 8·m to 8·m + 7 of a warp give the addresses of the rows of matrix m. Thread t holds the elements
        (t div 4, 2·(t mod 4)) and the one on its right; of a transposed matrix, the elements at the mirrored places.
        """
        storing, transposed = instruction.opcode.startswith("st"), ".trans" in instruction.opcode
        address, registers = instruction.operands if storing else reversed(instruction.operands)
        assert isinstance(registers, tuple), registers
        starts = self._addresses(address, "shared")
        if (starts[active] % 16).any():
            raise Fault("misaligned: a row of 16 bytes")
        for threads in self._whole_warps(active):
            row, column = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
            for matrix, register in enumerate(registers):
                starts_of_rows = starts[threads[8 * matrix : 8 * matrix + 8]]
                bits = self.value(register, "b32")[threads] if storing else np.zeros(WARP, np.uint32)
                for half in range(2):
                    place = (column + half, row) if transposed else (row, column + half)
                    address_of_half = starts_of_rows[place[0]] + 2 * place[1]
                    shift = np.uint32(16 * half)
                    part = (bits >> shift).astype(np.uint16).view(np.uint8).reshape(WARP, 2) if storing else None
                    got = self._bytes("shared", address_of_half, 2, threads, part)
                    if not storing:
                        bits |= got.view(np.uint16)[:, 0].astype(np.uint32) << shift
                if not storing:
                    whole, mine = np.zeros(len(self.threads), np.uint32), np.zeros(len(self.threads), np.bool_)
                    whole[threads], mine[threads] = bits, True
                    self.write(register, whole, mine)

    # Exchange within a warp.

    @step("shfl.sync.{bfly,idx}.b32")
    def _shuffle(self, instruction: Instruction, active: Active) -> None:
        target, source, lane, clamp, members = instruction.operands
        if clamp != "31":
            raise Fault("unknown shuffle")
        self._whole_warps(active, members)
        given = self.value(lane, "b32").astype(np.int64) & WARP - 1
        first = self.threads // WARP * WARP
        lanes = given if ".idx" in instruction.opcode else self.threads % WARP ^ given
        self.write(target, self.value(source, "b32")[first + lanes], active)

    @step("redux.sync.add.s32")
    def _sum_of_warp(self, instruction: Instruction, active: Active) -> None:
        target, source, members = instruction.operands
        self._whole_warps(active, members)
        sums = self.value(source, "s32").reshape(-1, WARP).sum(1, dtype=np.int32)
        self.write(target, np.repeat(sums, WARP), active)
