"""Interpret a pickle without executing anything in it.

One interpreter of pickle's opcodes, protocols 2 to 5. A global stands for what
a `Grammar` states it stands for; a pickle that names any other is refused
with that name. Nothing is imported, nothing of the pickle is called, and what
comes out is plain values and inert objects.

Lengths, memo slots, nesting and the number of containers are checked before
anything is allocated, so time and memory grow with the size of the pickle and
with nothing that it states about itself.

What the objects mean is defined in `dcp.metadata` and `pickles.values`.

`OPCODES` is the table, by the byte. Only what writers of protocols 2 to 5 use is
there; the opcodes that reach outside the pickle (extensions, buffers, instances
by name) are refused as unsafe, all others as damage.

Source: CPython 3.14 `Lib/pickletools.py`.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ckptctl.formats.pickles.machine import MAX_MARKS, Machine, Opcodes, Shapes
from ckptctl.formats.pickles.stubs import Grammar, Malformed, Stub


def read_pickle(data: bytes, grammar: Grammar, shapes: Shapes | None = None) -> object:
    """The one object that the pickle `data` builds under `grammar`.

    `shapes` makes it faster and never different, except that lists and dicts then
    hold a `Run` in place of the objects that were taken in one go.

    Raises `MetadataUnsafe` for a name, a call or an opcode that the grammar does
    not have, `MetadataUnreadable` for anything that is not a whole, well-formed
    pickle. Both name the offset in bytes. Time and memory are linear in the size: a
    `MemoryError` is no fault of the pickle, and passes through.
    """
    with collector_paused():
        try:
            machine = _machine(data, grammar, shapes)
            try:
                return machine.run()
            finally:
                # They refer to the machine: without this only the collector would free both.
                machine.shapes = {}
        except RecursionError:
            # Runs that refer to runs, thousands deep: only a forger writes that.
            return _machine(data, grammar, None).run()


def read_pickle_at(data: bytes, at: int, grammar: Grammar) -> tuple[object, int]:
    """The object that the pickle at byte `at` builds, and where that pickle ends.

    Raises as `read_pickle`; offsets in the messages count from `at`.
    """
    with collector_paused():
        machine = _machine(data[at:], grammar, None)
        value = machine.run_first()
        return value, at + machine.pos


def _machine(data: bytes, grammar: Grammar, shapes: Shapes | None) -> Machine:
    machine = Machine(data, grammar, OPCODES)
    if shapes is not None:
        machine.shapes = shapes(machine)
    return machine


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cyclic collector, which takes three quarters of the time of a large pickle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_Opcode = Callable[[Machine], None]


def _not_an_opcode(m: Machine) -> None:
    m.damaged(f"0x{m.data[m.at]:02x} is no opcode of pickle protocols 2 to 5")


_table: list[_Opcode] = [_not_an_opcode] * 256
OPCODES: Opcodes = _table


def _opcode(code: int) -> Callable[[_Opcode], _Opcode]:
    def register(op: _Opcode) -> _Opcode:
        _table[code] = op
        return op

    return register


def _constant(code: int, value: object) -> None:
    @_opcode(code)
    def push(m: Machine) -> None:
        m.stack.append(value)


_constant(0x4E, None)  # NONE
_constant(0x88, True)  # NEWTRUE
_constant(0x89, False)  # NEWFALSE
_constant(0x29, ())  # EMPTY_TUPLE


# Numbers and strings.


@_opcode(0x4B)  # BININT1
def _binint1(m: Machine) -> None:
    m.push(m.take(1)[0])


@_opcode(0x4D)  # BININT2
def _binint2(m: Machine) -> None:
    m.push(int.from_bytes(m.take(2), "little"))


@_opcode(0x4A)  # BININT
def _binint(m: Machine) -> None:
    m.push(int.from_bytes(m.take(4), "little", signed=True))


@_opcode(0x8A)  # LONG1
def _long1(m: Machine) -> None:
    _push_long(m, m.take(1)[0])


@_opcode(0x8B)  # LONG4
def _long4(m: Machine) -> None:
    _push_long(m, int.from_bytes(m.take(4), "little", signed=True))


def _push_long(m: Machine, n_bytes: int) -> None:
    if not 0 <= n_bytes <= m.grammar.max_int_bytes:
        m.damaged(f"an integer of {n_bytes:,} bytes")
    m.push(int.from_bytes(m.take(n_bytes), "little", signed=True))


@_opcode(0x47)  # BINFLOAT
def _binfloat(m: Machine) -> None:
    m.push(struct.unpack(">d", m.take(8))[0])


@_opcode(0x8C)  # SHORT_BINUNICODE
def _short_binunicode(m: Machine) -> None:
    _push_text(m, 1)


@_opcode(0x58)  # BINUNICODE
def _binunicode(m: Machine) -> None:
    _push_text(m, 4)


@_opcode(0x8D)  # BINUNICODE8
def _binunicode8(m: Machine) -> None:
    _push_text(m, 8)


def _push_text(m: Machine, length_bytes: int) -> None:
    text = m.take(int.from_bytes(m.take(length_bytes), "little"))
    try:
        m.push(str(text, "utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        m.damaged("a string is not UTF-8")


@_opcode(0x43)  # SHORT_BINBYTES
def _short_binbytes(m: Machine) -> None:
    m.push(m.take(m.take(1)[0]))


@_opcode(0x42)  # BINBYTES
def _binbytes(m: Machine) -> None:
    m.push(m.take(int.from_bytes(m.take(4), "little")))


@_opcode(0x8E)  # BINBYTES8
def _binbytes8(m: Machine) -> None:
    m.push(m.take(int.from_bytes(m.take(8), "little")))


@_opcode(0x96)  # BYTEARRAY8
def _bytearray8(m: Machine) -> None:
    m.push(bytearray(m.take(int.from_bytes(m.take(8), "little"))))


# Containers.


@_opcode(0x28)  # MARK
def _mark(m: Machine) -> None:
    if len(m.marks) == MAX_MARKS:
        m.damaged(f"more than {MAX_MARKS:,} containers are open at once")
    m.marks.append(m.stack)
    m.stack = []


@_opcode(0x85)  # TUPLE1
def _tuple1(m: Machine) -> None:
    m.push_container((m.pop(),))


@_opcode(0x86)  # TUPLE2
def _tuple2(m: Machine) -> None:
    second, first = m.pop(), m.pop()
    m.push_container((first, second))


@_opcode(0x87)  # TUPLE3
def _tuple3(m: Machine) -> None:
    third, second, first = m.pop(), m.pop(), m.pop()
    m.push_container((first, second, third))


@_opcode(0x74)  # TUPLE
def _tuple(m: Machine) -> None:
    m.push_container(tuple(m.pop_to_mark()))


@_opcode(0x5D)  # EMPTY_LIST
def _empty_list(m: Machine) -> None:
    m.push_container([])


@_opcode(0x61)  # APPEND
def _append(m: Machine) -> None:
    item = m.pop()
    m.append_items(m.top(), [item])


@_opcode(0x65)  # APPENDS
def _appends(m: Machine) -> None:
    items = m.pop_runs_to_mark()
    m.append_items(m.top(), items)


@_opcode(0x7D)  # EMPTY_DICT
def _empty_dict(m: Machine) -> None:
    m.push_container({})


@_opcode(0x73)  # SETITEM
def _setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.top(), [key, value])


@_opcode(0x75)  # SETITEMS
def _setitems(m: Machine) -> None:
    items = m.pop_runs_to_mark()
    m.set_items(m.top(), items)


@_opcode(0x8F)  # EMPTY_SET
def _empty_set(m: Machine) -> None:
    m.n_left -= 3  # the empty set is four times as large as the empty list
    m.push_container(set())


@_opcode(0x90)  # ADDITEMS
def _additems(m: Machine) -> None:
    items = m.pop_to_mark()
    target = m.top()
    if not isinstance(target, set):
        m.damaged("values are added to what is no set")
    target.update(map(m.checked_key, items))


@_opcode(0x91)  # FROZENSET
def _frozenset(m: Machine) -> None:
    m.n_left -= 3
    m.push_container(frozenset(map(m.checked_key, m.pop_to_mark())))


# The stack and the memo.


@_opcode(0x30)  # POP
def _pop(m: Machine) -> None:
    if m.stack:
        m.pop()
    else:
        m.pop_to_mark()


@_opcode(0x31)  # POP_MARK
def _pop_mark(m: Machine) -> None:
    m.pop_to_mark()


@_opcode(0x32)  # DUP
def _dup(m: Machine) -> None:
    m.push(m.top())


@_opcode(0x94)  # MEMOIZE
def _memoize(m: Machine) -> None:
    m.remember(m.memo.n_slots)


@_opcode(0x71)  # BINPUT
def _binput(m: Machine) -> None:
    m.remember(m.take(1)[0])


@_opcode(0x72)  # LONG_BINPUT
def _long_binput(m: Machine) -> None:
    m.remember(int.from_bytes(m.take(4), "little"))


@_opcode(0x68)  # BINGET
def _binget(m: Machine) -> None:
    m.push(m.recall(m.take(1)[0]))


@_opcode(0x6A)  # LONG_BINGET
def _long_binget(m: Machine) -> None:
    m.push(m.recall(int.from_bytes(m.take(4), "little")))


@_opcode(0x95)  # FRAME
def _frame(m: Machine) -> None:
    n_bytes = int.from_bytes(m.take(8), "little")
    if n_bytes > m.end - m.pos:
        m.damaged(f"a frame of {n_bytes:,} bytes begins, {m.end - m.pos:,} are left")


# Names, calls and objects.


@_opcode(0x63)  # GLOBAL
def _global(m: Machine) -> None:
    module, name = _line(m), _line(m)
    m.push_global(module, name)


def _line(m: Machine) -> str:
    end = m.data.find(b"\n", m.pos, m.pos + 1_000)
    if not 0 <= end < m.end:
        m.damaged("the name of a global has no end")
    line = m.take(end - m.pos)
    m.pos += 1
    try:
        return line.decode()
    except UnicodeDecodeError:
        m.damaged("the name of a global is not UTF-8")


@_opcode(0x93)  # STACK_GLOBAL
def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    m.push_global(module, name)


@_opcode(0x52)  # REDUCE
def _reduce(m: Machine) -> None:
    args, function = m.pop(), m.pop()
    m.call(function, args)


@_opcode(0x81)  # NEWOBJ
def _newobj(m: Machine) -> None:
    args, cls = m.pop(), m.pop()
    m.call(cls, args)


@_opcode(0x92)  # NEWOBJ_EX
def _newobj_ex(m: Machine) -> None:
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    if kwargs:
        m.unsafe("makes an object from keyword arguments")
    m.call(cls, args)


@_opcode(0x62)  # BUILD
def _build(m: Machine) -> None:
    state = m.pop()
    target = m.top()
    m.build(target, state)
    if isinstance(target, Stub) and target.kind in m.shapes:
        m.shapes[target.kind].take(m)


@_opcode(0x51)  # BINPERSID
def _binpersid(m: Machine) -> None:
    if m.grammar.persistent is None:
        m.unsafe("asks for a persistent id")
    try:
        m.push_container(m.grammar.persistent(m.pop()))
    except Malformed as wrong:
        m.damaged(str(wrong))


_NEVER_HARMLESS: Mapping[int, str] = {
    0x50: "PERSID",
    0x69: "INST",
    0x6F: "OBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}


def _forbid(code: int, name: str) -> None:
    @_opcode(code)
    def refuse(m: Machine) -> None:
        m.unsafe(f"holds the opcode {name}, which no writer of checkpoints uses")


for _code, _name in _NEVER_HARMLESS.items():
    _forbid(_code, _name)
