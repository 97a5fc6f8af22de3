"""Inline assembly, as PTX: warps run it one instruction after the other, in random turns.

A register is an array of 32 lanes. Lanes that a branch separates go on with those at the earlier
instruction, so that they meet again. Warps take turns at instructions that access memory, and wait
for each other at barriers. :mod:`.races` finds accesses to shared memory that no barrier orders.

PTX names registers and not tensors, so the place of each element counts here: a matrix has a row
for each warp, of which each lane holds four neighbours, then the four that follow those of all
lanes; of a vector, neighbours are in neighbouring lanes. Layouts of the kernel are not looked at.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

from sparsemla_lab.testing.interpreter import floats
from sparsemla_lab.testing.interpreter.races import ATOMIC, READ, WRITE, Variable
from sparsemla_lab.testing.interpreter.schedule import Program, WarpBarrier, program
from sparsemla_lab.testing.interpreter.values import (
    POISON,
    UNSIGNED,
    Array,
    Tensor,
    as_tensor,
    bytes_of,
    from_bits,
    layout_of,
    to_bits,
)

LANES = np.arange(32)
SWITCHES = 0.1
"""Chance that another warp goes on before an access to memory."""


# ---- the text ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """An address: a register and a number of bytes."""

    register: str
    offset: int


Operand = str | int | Address | tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Args:
        guard: the predicate of lanes that run it, or None.
        negated: it is run where the predicate does not hold.
        name: its name, in parts.
        operands: registers, numbers, addresses and vectors of registers.
    """

    guard: str | None
    negated: bool
    name: tuple[str, ...]
    operands: tuple[Operand, ...]

    @functools.cached_property
    def space(self) -> str:
        """The memory that it accesses, or an empty string."""
        return self.name[1] if self.name[0] in ("ld", "st", "red") else ""

    @functools.cached_property
    def yields(self) -> bool:
        """Whether other warps can tell when it is run."""
        return self.space != "" or self.name[0] in ("bar", "barrier")


@dataclass(frozen=True)
class Block:
    """The text of an ``asm``.

    Args:
        instructions: in order.
        labels: number of the instruction behind each label.
        variables: bytes of each variable in shared memory.
        registers: names that are declared.
    """

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    variables: Mapping[str, int]
    registers: frozenset[str]

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether warps do the same and cannot tell what others do, so that all run it at once."""
        return not any(
            each.yields
            or each.name[0] == "bra"
            or {"%tid.x", "%cluster_ctarank"} & {*each.operands}
            for each in self.instructions
        )

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """Whether the results of a lane depend on nothing but its operands."""
        return self.is_alone and not any(
            "sync" in each.name or "%laneid" in each.operands for each in self.instructions
        )


STATEMENT = re.compile(r"(?:(\w+):(?!:))?\s*(?:@(!?)(\w+)\s+)?([\w.:%]+)?\s*(.*)", re.DOTALL)
VARIABLE = re.compile(r"\.shared \.align \d+ \.b(\d+) (\w+)\[(\d+)\]")


@functools.cache
def parse(text: str) -> Block:
    """Read the text of an ``asm``."""
    text = text.strip()
    if text.startswith("{"):
        text = text[1:-1]
    instructions: list[Instruction] = []
    labels, variables = {}, {}
    registers: set[str] = set()
    for statement in (each.strip() for each in text.split(";")):
        if found := VARIABLE.fullmatch(statement):
            bits, name, count = found.groups()
            variables[name] = int(bits) // 8 * int(count)
        elif statement.startswith(".reg"):
            for name in statement.split(None, 2)[2].split(","):
                registers.update(_declared(name.strip()))
        elif statement:
            label, negated, guard, name, operands = _matched(statement)
            if label:
                labels[label] = len(instructions)
            if name:
                parts = tuple(name.replace("::", "_").split("."))
                instructions.append(
                    Instruction(guard, negated == "!", parts, tuple(_operands(operands)))
                )
    return Block(tuple(instructions), labels, variables, frozenset(registers))


def _matched(statement: str) -> Sequence[str]:
    found = STATEMENT.fullmatch(statement)
    if found is None:
        raise NotImplementedError(f"the interpreter does not know the assembly {statement!r}")
    return found.groups()


def _declared(name: str) -> Iterator[str]:
    """``bin<3>`` are three registers."""
    if found := re.fullmatch(r"(\w+)<(\d+)>", name):
        yield from (f"{found[1]}{i}" for i in range(int(found[2])))
    else:
        yield name


def _operands(text: str) -> Iterator[Operand]:
    for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text):
        if each[0] == "{":
            yield tuple(name.strip() for name in each[1:-1].split(","))
        elif each[0] == "[":
            register, _, offset = each[1:-1].partition("+")
            yield Address(register.strip(), int(offset or 0))
        elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", each):
            yield int(each, 0)
        elif re.fullmatch(r"0[fF][0-9a-fA-F]{8}", each):  # the bits of a float32
            yield int(each[2:], 16)
        else:
            yield each


# ---- arithmetic --------------------------------------------------------------------------------

TYPES = {
    "b16": np.uint16,
    "u16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _shifted(shift: Any) -> Callable[[Array, Array], Array]:
    """Shifts by more bits than there are give 0."""
    return lambda x, by: np.where(by > 31, 0, shift(x, np.minimum(by, 31)))


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes of eight; the fourth bit of a selector asks for eight times the sign instead."""
    both = np.stack(np.broadcast_arrays(a, b, selector)[:2], -1).view(np.uint8)
    of_result = selector[..., None] >> 4 * np.arange(4)
    found = np.take_along_axis(both, (of_result & 7).astype(int), -1)
    signs = np.where(found & 128, 255, 0).astype(np.uint8)
    return np.where(of_result & 8, signs, found).view(np.uint32)[..., 0]


def _looked_up(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Each bit is that of a table, at the number of which three bits are the digits."""
    found = np.zeros_like(a)
    for number in range(8):
        digits = (x if number & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
        found |= functools.reduce(np.bitwise_and, digits) & -(table >> number & 1)
    return found


def _dot_of_bytes(a: Array, b: Array, c: Array) -> Array:
    return c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4))


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mov": lambda x: x,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "lop3": _looked_up,
    "shl": _shifted(np.left_shift),
    "shr": _shifted(np.right_shift),
    "bfe": lambda x, start, length: x >> start & (1 << length) - 1,
    "clz": lambda x: 32 - np.frexp(x.astype(np.float64))[1],
    "popc": lambda x: np.unpackbits(x[..., None].copy().view(np.uint8), axis=-1).sum(-1),
    "prmt": _permuted,
    "dp4a": _dot_of_bytes,
}
"""Results of operands; the bits that fit the result's type are kept."""
REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}


# ---- shared memory -----------------------------------------------------------------------------

OF_CTA, OF_VARIABLE = 28, 20
"""The first bit of an address that tells the CTA, counted from 1, and the variable."""


def _address_of(block: Block, name: str, cluster: Program) -> int:
    """The address of a variable, which is allocated when it is first named."""
    for number, variable in enumerate(cluster.variables, 1):
        if variable.block is block and variable.name == name:
            return number << OF_VARIABLE
    warps = [cluster.warps_of(cta) for cta in range(cluster.num_ctas)]
    words = block.variables[name] // 4
    cluster.variables.append(Variable(block, name, words, warps, cluster.clocks))
    return len(cluster.variables) << OF_VARIABLE


def _shared_words(
    warp: Warp, kind: int, space: str, at: Array, lanes: Array
) -> Iterator[tuple[Array, Array, Array]]:
    """The words at addresses, by the piece of memory that they lie in: it, the words, a mask.

    Raises:
        IndexError: words outside of a variable.
    """
    pieces = at >> OF_VARIABLE
    for piece in np.unique(pieces):
        inside = pieces == piece
        cta = (int(piece) >> OF_CTA - OF_VARIABLE) - 1
        if cta < 0:
            cta = warp.cta
        elif space == "shared":
            raise RuntimeError("a kernel accesses the memory of another CTA as its own")
        variables = warp.program.variables
        number = int(piece) % (1 << OF_CTA - OF_VARIABLE)
        words = at[inside] % (1 << OF_VARIABLE) // 4
        if not 0 < number <= len(variables) or words.max() >= variables[number - 1].words.shape[1]:
            raise IndexError(f"warp {warp.number} accesses shared memory outside of all variables")
        variable = variables[number - 1]
        variable.accesses[cta].record(kind, warp.number, lanes[inside], words)
        yield variable.words[cta], words, inside


# ---- warps -------------------------------------------------------------------------------------


class Warp:
    """A warp that runs a block; or all of them, if they run it at once.

    Args:
        program: the cluster.
        number: of the warp in the cluster.
        block: what it runs.
        registers: operands, by name.
        clobbers: by the name of a result, operands that the compiler may keep in its register.
    """

    def __init__(
        self,
        program: Program,
        number: int,
        block: Block,
        registers: dict[str, Array],
        clobbers: Mapping[str, Sequence[str]],
    ) -> None:
        self.program, self.number = program, number
        self.cta, self._of_cta = divmod(number, program.num_warps)
        self._block, self._clobbers = block, clobbers
        self.registers = registers
        self.waits_for: WarpBarrier | None = None
        self._all = np.ones(next(iter(registers.values())).shape, bool)
        self._at = {0: self._all}
        self.ended = False

    @property
    def can_run(self) -> bool:
        return self.waits_for is None or self.waits_for.has_ended(self.number)

    def steps(self) -> Iterator[None]:
        """Run to the end, with a pause wherever another warp may go on."""
        instructions = self._block.instructions
        while self._at:
            place = min(self._at)
            lanes = self._at.pop(place)
            if place == len(instructions):
                break
            instruction = instructions[place]
            active = lanes
            if instruction.guard is not None:
                active = lanes & (self.registers[instruction.guard] != instruction.negated)
            if instruction.name[0] == "bra":
                label = instruction.operands[0]
                for target, some in (
                    (self._block.labels[str(label)], active),
                    (place + 1, lanes & ~active),
                ):
                    if some.any():
                        self._go(target, some)
                if "uni" in instruction.name and len(self._at) > 1:
                    raise RuntimeError(f"lanes of a warp disagree about a bra.uni to {label}")
                continue
            if instruction.yields:
                yield
            if instruction.name[0] in ("bar", "barrier"):
                self._check_together(instruction, lanes)
                self._synchronise(instruction)
                if self.waits_for is not None:
                    if not self.can_run:
                        yield
                    self.waits_for.acquire(self.number)
                    self.waits_for = None
            elif active is lanes or active.any():
                self._run(instruction, lanes, active)
            self._go(place + 1, lanes)
        self.ended = True

    def _go(self, place: int, lanes: Array) -> None:
        self._at[place] = self._at[place] | lanes if place in self._at else lanes

    def _check_together(self, instruction: Instruction, lanes: Array) -> None:
        if not lanes.all():
            raise RuntimeError(
                f"not all lanes of a warp reach {'.'.join(instruction.name)} together"
            )

    def _synchronise(self, instruction: Instruction) -> None:
        """Arrive at a barrier, or begin to wait for it."""
        kind, *rest = instruction.name
        if kind == "bar" and rest == ["sync"] and instruction.operands == (0,):
            self.waits_for = self.program.barriers[self.cta]
            self.waits_for.arrive(self.number)
        elif kind == "barrier" and rest[:2] == ["cluster", "arrive"]:
            self.program.cluster_barrier.arrive(self.number, "relaxed" not in rest)
        elif kind == "barrier" and rest[:2] == ["cluster", "wait"]:
            self.waits_for = self.program.cluster_barrier
        else:
            raise _unknown(instruction)

    def _run(self, instruction: Instruction, lanes: Array, active: Array) -> None:
        name, operands = instruction.name, instruction.operands
        kind = name[0]
        if instruction.space:
            self._access(instruction, active)
        elif kind == "setp":
            *then, of = name[2:]
            found = COMPARE[name[1]](*(self._read(each, TYPES[of]) for each in operands[1:3]))
            if then:
                found = {"and": np.logical_and, "or": np.logical_or}[then[0]](
                    found, self.registers[str(operands[3])]
                )
            self._write(operands[0], found, active)
        elif kind == "selp":
            x, y = (self._read(each, TYPES[name[1]]) for each in operands[1:3])
            self._write(operands[0], np.where(self.registers[str(operands[3])], x, y), active)
        elif len(name) > 1 and name[1] == "sync":
            self._check_together(instruction, lanes & active)
            self._exchange(instruction)
        elif kind == "mapa":
            at, cta = (self._read(each, np.uint32) for each in operands[1:])
            if (cta >= self.program.num_ctas).any():
                raise IndexError(f"warp {self.number} maps an address to a CTA outside the cluster")
            self._write(operands[0], at | cta + np.uint32(1) << np.uint32(OF_CTA), active)
        elif kind == "cp" and "prefetch" in name:
            self._prefetch(operands, active)
        elif kind == "mov" and isinstance(operands[0], tuple):  # the parts of a register
            whole = np.ascontiguousarray(self._read(operands[1], TYPES[name[-1]]))
            size = whole.itemsize // len(operands[0])
            parts = whole[..., None].view(UNSIGNED[size])
            for i, register in enumerate(operands[0]):
                self._write(register, parts[..., i], active)
        elif kind == "cvt":
            self._write(operands[0], self._convert(instruction), active)
        elif kind in floats.ARITHMETIC and name[-1] in floats.FORMATS:
            self._write(operands[0], self._compute_floats(instruction), active)
        elif kind in ARITHMETIC:
            self._write(operands[0], self._compute(instruction), active)
        else:
            raise _unknown(instruction)

    def _compute(self, instruction: Instruction) -> Array:
        kind, *modifiers, of = instruction.name
        values = instruction.operands[1:]
        dtype: Any = TYPES[of]
        if kind == "mov" and isinstance(values[0], tuple):  # the parts of a longer register
            size = np.dtype(dtype).itemsize // len(values[0])
            return _joined([self._read(each, UNSIGNED[size]) for each in values[0]])
        if "wide" in modifiers:
            found = ARITHMETIC[kind](*(self._read(x, dtype).astype(np.int64) for x in values))
            return np.asarray(found).view(np.uint64)
        with np.errstate(all="ignore"):
            found = np.asarray(ARITHMETIC[kind](*(self._read(each, dtype) for each in values)))
        return found.astype(dtype, copy=False)

    def _compute_floats(self, instruction: Instruction) -> Array:
        kind, *modifiers, of = instruction.name
        if not floats.MODIFIERS.issuperset(modifiers):
            raise _unknown(instruction)
        operands = [self._read_bits(each, of) for each in instruction.operands[1:]]
        return floats.compute(kind, modifiers, of, operands)

    def _convert(self, instruction: Instruction) -> Array:
        _, *modifiers, to, of = instruction.name
        if not floats.MODIFIERS.issuperset(modifiers):
            raise _unknown(instruction)
        sources = instruction.operands[1:]
        if to in floats.FORMATS and of in floats.FORMATS:
            numbers = [floats.decode(self._read_bits(each, of), of) for each in sources]
            return floats.convert(to, modifiers, numbers)
        if to in floats.FORMATS:
            whole = self._read(sources[0], TYPES[of]).astype(np.float64)
            return floats.convert(to, modifiers, [whole[..., None]])
        if of in floats.FORMATS:
            raise _unknown(instruction)
        return self._read(sources[0], TYPES[of]).astype(TYPES[to])

    def _read_bits(self, operand: Operand, of: str) -> Array:
        """The bits of a register with floating-point numbers."""
        return self._read(operand, UNSIGNED[floats.size_of(of)])

    def _exchange(self, instruction: Instruction) -> None:
        """Instructions in which lanes give each other their values."""
        (kind, _, *how), operands = instruction.name, instruction.operands
        if kind == "redux":
            x = self._read(operands[1], TYPES[how[1]])
            found = REDUCTIONS[how[0]].reduce(x, axis=-1, keepdims=True, dtype=x.dtype)
            self._write(operands[0], found + np.zeros_like(x))
        elif kind == "vote" and how[0] == "ballot":
            bits = self.registers[str(operands[1])] * (1 << LANES)
            found = bits.sum(-1, keepdims=True).astype(np.uint32)
            self._write(operands[0], np.broadcast_to(found, bits.shape))
        elif kind == "shfl":
            result, _, within = str(operands[0]).partition("|")
            x, by = (self._read(each, np.uint32) for each in operands[1:3])
            source = {"up": LANES - by.astype(int), "bfly": LANES ^ by, "idx": by & 31 | LANES * 0}
            if how[0] not in source or operands[3] != (0 if how[0] == "up" else 31):
                raise _unknown(instruction)
            lane = source[how[0]].astype(int)
            inside = (lane >= 0) & (lane < 32)
            lane = np.broadcast_to(np.where(inside, lane, LANES), x.shape)
            self._write(result, np.take_along_axis(x, lane, -1))
            if within:
                self._write(within, np.broadcast_to(inside, x.shape))
        else:
            raise _unknown(instruction)

    def _prefetch(self, operands: Sequence[Operand], active: Array) -> None:
        """A hint; but the tile must lie inside a tensor."""
        at = self._addresses(operands[0], active)
        size = self._read(operands[1], np.uint32)[active].astype(np.int64)
        if (at % 16).any() or (size % 16).any():
            raise IndexError(f"warp {self.number} prefetches a piece that 16 does not divide")
        self.program.memory.check(np.concatenate([at, at + size - 1]))

    def _addresses(self, operand: Any, active: Array) -> Array:
        found = self._bits(operand.register)
        return np.asarray(found[active].astype(np.int64) + operand.offset)

    def _access(self, instruction: Instruction, active: Array) -> None:
        """Load, store, or add without a result."""
        kind, space, *modifiers, of = instruction.name
        place, value = instruction.operands[:: -1 if kind == "ld" else 1]
        registers = value if isinstance(value, tuple) else (value,)
        if len(registers) != int(next((each[1:] for each in modifiers if each[0] == "v"), 1)):
            raise _unknown(instruction)
        dtype: Any = TYPES[of]
        size = np.dtype(dtype).itemsize
        start = self._addresses(place, active)
        if (start % (size * len(registers))).any():
            raise IndexError(f"warp {self.number}: {'.'.join(instruction.name)} is misaligned")
        at = (start[:, None] + size * np.arange(len(registers))).ravel()
        lanes = np.repeat(LANES[active], len(registers))
        values = None
        if kind != "ld":
            values = np.stack([self._read(each, dtype)[active] for each in registers], 1).ravel()
        if space == "global":
            found = self._access_global(kind, at, dtype, lanes, values)
        else:
            if size != 4:
                raise _unknown(instruction)
            found = self._access_shared(kind, space, at, lanes, values)
        if values is None:
            for register, column in zip(
                registers, found.reshape(-1, len(registers)).T, strict=True
            ):
                whole = np.zeros(active.shape, np.uint32)
                whole[active] = column
                self._write(register, whole, active)

    def _access_global(
        self, kind: str, at: Array, dtype: Any, lanes: Array, values: Array | None
    ) -> Array:
        element = tl.uint16 if dtype == np.uint16 else tl.uint32
        threads = 32 * self.number + lanes
        if values is None:
            return self.program.memory.read(at, element, threads)
        if kind == "red":
            raise NotImplementedError("atomic additions to global memory")
        self.program.memory.write(at, element, threads, values)
        return at

    def _access_shared(
        self, kind: str, space: str, at: Array, lanes: Array, values: Array | None
    ) -> Array:
        found = np.zeros(at.shape, np.uint32)
        access = {"ld": READ, "st": WRITE, "red": ATOMIC}[kind]
        for memory, words, inside in _shared_words(self, access, space, at, lanes):
            if values is None:
                found[inside] = memory[words]
            elif kind == "red":
                np.add.at(memory, words, values[inside])
            else:
                memory[words] = values[inside]
        return found

    def _read(self, operand: Operand, dtype: Any) -> Array:
        """The lanes of a register, a number or the address of a variable, in a type."""
        if isinstance(operand, int):
            return _number(operand, dtype, self._all.shape)
        found = self._bits(str(operand))
        if found.itemsize != np.dtype(dtype).itemsize:
            raise RuntimeError(
                f"a kernel reads {8 * np.dtype(dtype).itemsize} bits of the register {operand}, "
                f"which has {8 * found.itemsize}"
            )
        return found if found.dtype == dtype else found.view(dtype)

    def _bits(self, name: str) -> Array:
        if name in self.registers:
            return self.registers[name]
        if name in self._block.variables:
            address = _address_of(self._block, name, self.program)
            return np.full(self._all.shape, address, np.uint32)
        if name in ("%laneid", "%tid.x", "%cluster_ctarank"):
            first = {"%tid.x": 32 * self._of_cta, "%cluster_ctarank": self.cta}.get(name, 0)
            lanes = 0 if name == "%cluster_ctarank" else LANES
            return np.broadcast_to(first + lanes, self._all.shape).astype(np.uint32)
        if name in self._block.registers:
            raise RuntimeError(f"a kernel reads the register {name}, to which it has not written")
        raise NotImplementedError(f"the interpreter does not know the operand {name!r}")

    def _write(self, operand: Operand, values: Array, active: Array | None = None) -> None:
        name = str(operand)
        if name in self._clobbers:
            for other in self._clobbers[name]:
                self.registers[other] = np.full_like(self.registers[other], POISON)
        if values.dtype.kind in "if" and values.dtype != bool:
            values = values.view(f"u{values.dtype.itemsize}")
        if active is not None and active is not self._all and not active.all():
            before = self.registers.get(name, np.asarray(POISON, values.dtype))
            values = np.where(active, values, before)
        self.registers[name] = values


@functools.cache
def _number(number: int, dtype: Any, shape: tuple[int, ...]) -> Array:
    return np.full(shape, np.asarray(number).astype(dtype))


def _unknown(instruction: Instruction) -> NotImplementedError:
    text = f"{'.'.join(instruction.name)} {instruction.operands}"
    return NotImplementedError(f"the interpreter does not know the assembly {text}")


# ---- the call ----------------------------------------------------------------------------------


def run(asm: str, constraints: str, operands: Sequence[Any], dtype: Any, pack: int) -> Any:
    """Run an ``asm`` on all threads of the cluster; the result is like Triton's."""
    block, cluster = parse(asm), program()
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    tensors = [as_tensor(each) for each in operands]
    shape = np.broadcast_shapes(*(tensor.values.shape for tensor in tensors))
    inputs = [
        np.broadcast_to(to_bits(tensor.values, tensor.dtype), shape).ravel() for tensor in tensors
    ]
    kinds = constraints.split(",")
    of_results = list(_registers(dtypes, pack))
    of_operands = list(_registers([tensor.dtype for tensor in tensors], pack))
    first = len(of_results)
    tied = {first + i: int(each) for i, each in enumerate(kinds[first:]) if each.isdigit()}
    results = [np.full(inputs[0].shape, POISON, f"u{bytes_of(each)}") for each in dtypes]
    for elements in _elements(shape, cluster, pack, block.is_elementwise):
        warps = [elements] if block.is_alone else list(elements.transpose(1, 0, 2))
        running = []
        for number, places in enumerate(warps):
            registers = {
                f"${tied.get(number, number)}": _joined(inputs[i][places[some]])
                for number, (i, some) in enumerate(of_operands, first)
            }
            running.append(Warp(cluster, number, block, registers, _clobbered(kinds, first, tied)))
        _take_turns(running, cluster)
        for warp, places in zip(running, warps, strict=True):
            for number, (i, some) in enumerate(of_results):
                register = warp.registers.get(f"${number}")
                if register is not None:
                    size = results[i].itemsize
                    parts = np.ascontiguousarray(register)[..., None].view(UNSIGNED[size])
                    results[i][places[some]] = np.moveaxis(parts, -1, 0)
    layout = layout_of(*tensors)
    found = tuple(
        Tensor(from_bits(bits.reshape(shape), each), each, layout)
        for bits, each in zip(results, dtypes, strict=True)
    )
    return found if isinstance(dtype, tuple) else found[0]


def _registers(dtypes: Sequence[tl.dtype], pack: int) -> Iterator[tuple[int, slice]]:
    """For each register, the number of its tensor, and which of the packed elements it holds."""
    for i, dtype in enumerate(dtypes):
        held = max(min(pack, 4 // bytes_of(dtype)), 1)
        yield from ((i, slice(j, j + held)) for j in range(0, pack, held))


def _joined(parts: Any) -> Array:
    """Registers that hold these parts, the first one in the lowest bits."""
    both = np.ascontiguousarray(np.stack(parts, -1))
    return both.view(UNSIGNED[both.itemsize * both.shape[-1]])[..., 0]


def _clobbered(
    kinds: Sequence[str], first: int, tied: Mapping[int, int]
) -> dict[str, tuple[str, ...]]:
    """Operands that may share the register of a result: it is no ``=&``, and not tied to one."""
    return {
        f"${i}": tuple(
            f"${j}" for j in range(first, len(kinds)) if kinds[j] == kinds[i][1:] and j not in tied
        )
        for i in range(first)
        if "&" not in kinds[i] and i not in tied.values()
    }


def _elements(
    shape: tuple[int, ...], cluster: Program, pack: int, is_elementwise: bool
) -> Iterator[Array]:
    """The elements ``[pack, warps, lanes]`` of each time that the threads run a block.

    If results depend on operands alone, all are ``[pack, ...]`` of one time.
    """
    warps = cluster.total_warps
    if not shape:
        yield np.zeros((pack, warps, 32), np.int64)
        return
    size = int(np.prod(shape))
    places: Array = np.arange(size)
    fills_threads = size % (32 * warps * max(pack, 4 * (len(shape) - 1))) == 0 and len(shape) <= 2
    if not fills_threads:
        if not is_elementwise or size % pack:
            raise NotImplementedError(f"a block of PTX on a tensor of shape {shape}")
        yield places.reshape(-1, pack).T
        return
    if len(shape) == 2:
        places = places.reshape(warps, -1, 32, 4).transpose(1, 3, 0, 2)
    places = places.reshape(-1, pack, warps, 32)
    if is_elementwise:
        yield places.swapaxes(0, 1)
    else:
        yield from places


def _take_turns(warps: Sequence[Warp], cluster: Program) -> None:
    """Run warps to their ends, in random order."""
    rng = cluster.rng
    left = {warp: warp.steps() for warp in warps}
    while left:
        able = [warp for warp in left if warp.can_run]
        if not able:
            raise RuntimeError(
                f"deadlock: {len(left)} of {len(warps)} warps wait at a barrier, the others have "
                "ended"
            )
        warp = rng.choice(able)
        for _ in left[warp]:
            if not warp.can_run or rng.random() < SWITCHES:
                break
        if warp.ended:
            del left[warp]
