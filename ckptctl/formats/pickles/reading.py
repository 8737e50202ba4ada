"""Interpret a pickle without executing anything in it.

One interpreter of pickle's opcodes. A global stands for what
a `Grammar` states it stands for; a pickle that names any other is refused
with that name. Nothing is imported, nothing of the pickle is called, and what
comes out is plain values and inert objects.

Lengths, memo slots, nesting and the number of containers are checked before
anything is allocated, so time and memory grow with the size of the pickle and
with nothing that it states about itself.

What the objects mean is defined in `dcp.metadata` and `pickles.values`.

`OPCODES` is the table, by the byte. Only what writers of protocols 2 to 5 use is
there; the opcodes that reach outside the pickle (extensions, buffers, instances
by name) are refused as unsafe, all others as damage. A lenient grammar reads with
`LENIENT_OPCODES`, as every unpickler does.

Source: CPython 3.14 `Lib/pickletools.py`.
"""

from __future__ import annotations

import codecs
import gc
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ckptctl.errors import MetadataUnreadable
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


class PickleRead(NamedTuple):
    """What one pickle of several builds, where it ends, and what is to be read of it still."""

    value: object
    end: int
    nested: Sequence[bytes]
    """Bytes in it that may be pickles; only a lenient grammar keeps them."""
    others: Sequence[object]
    """What the grammar made of the names that it does not list."""
    fault: MetadataUnreadable | None = None
    """Why it is damaged. What it did until then counts: an unpickler does it, too."""


def read_pickle_at(data: bytes, at: int, grammar: Grammar) -> PickleRead:
    """The object that the pickle at byte `at` builds; more bytes may follow it.

    Raises `MetadataUnsafe` as `read_pickle`; damage is returned as `fault`. Offsets in the
    messages count from `at`.
    """
    with collector_paused():
        machine = _machine(data[at:] if at else data, grammar, None)
        value: object = None
        try:
            value = machine.run_first()
            fault = machine.fault
        except MetadataUnreadable as error:
            fault = machine.fault or error
        return PickleRead(value, at + machine.pos, machine.nested, machine.others, fault)


def _machine(data: bytes, grammar: Grammar, shapes: Shapes | None) -> Machine:
    machine = Machine(data, grammar, LENIENT_OPCODES if grammar.lenient else OPCODES)
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


# What an opcode does that takes more than an expression.


def _push_long(m: Machine, n_bytes: int) -> None:
    if n_bytes > m.grammar.max_int_bytes and m.grammar.lenient:
        m.take(n_bytes)
        m.push(Stub("a long integer"))
        return
    if not 0 <= n_bytes <= m.grammar.max_int_bytes:
        m.damaged(f"an integer of {n_bytes:,} bytes")
    m.push(int.from_bytes(m.take(n_bytes), "little", signed=True))


def _push_text(m: Machine, length_bytes: int) -> None:
    text = m.take(int.from_bytes(m.take(length_bytes), "little"))
    try:
        m.push(str(text, "utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        m.damaged("a string is not UTF-8")


def _taken(m: Machine, length_bytes: int) -> bytes:
    return m.take(int.from_bytes(m.take(length_bytes), "little"))


def _mark(m: Machine) -> None:
    if len(m.marks) == MAX_MARKS:
        m.exceeded(f"more than {MAX_MARKS:,} containers are open at once")
    m.marks.append(m.stack)
    m.stack = []


def _popped(m: Machine, n_values: int) -> tuple[object, ...]:
    """The topmost values, the lowest of them first."""
    if m.has_runs or len(m.stack) < n_values:
        return tuple([m.pop() for _ in range(n_values)][::-1])
    values = tuple(m.stack[-n_values:])
    del m.stack[-n_values:]
    return values


def _append(m: Machine) -> None:
    item = m.pop()
    m.append_items(m.top(), [item])


def _appends(m: Machine) -> None:
    items = m.pop_runs_to_mark()
    m.append_items(m.top(), items)


def _setitem(m: Machine) -> None:
    pair = _popped(m, 2)
    m.set_items(m.top(), [*pair])


def _setitems(m: Machine) -> None:
    items = m.pop_runs_to_mark()
    m.set_items(m.top(), items)


def _push_set(m: Machine, made: set[object] | frozenset[object]) -> None:
    m.n_left -= 3  # the empty set is four times as large as the empty list
    m.push_container(made)


def _additems(m: Machine) -> None:
    items = m.pop_to_mark()
    m.add_items(m.top(), items)


def _pop(m: Machine) -> None:
    if m.stack:
        m.pop()
    else:
        m.pop_to_mark()


def _frame(m: Machine) -> None:
    n_bytes = int.from_bytes(m.take(8), "little")
    if n_bytes > m.end - m.pos:
        m.damaged(f"a frame of {n_bytes:,} bytes begins, {m.end - m.pos:,} are left")
    if m.grammar.lenient:
        if m.pos < m.frame_end < m.pos + n_bytes:
            m.crosses_frame()
        m.frame_end = max(m.frame_end, m.pos + n_bytes)


def _line(m: Machine) -> str:
    end = m.data.find(b"\n", m.pos, m.pos + 1_000)
    if not 0 <= end < m.end:
        if m.data.find(b"\n", m.pos, m.end) >= 0 and m.data[:1] == b"\x80":
            m.unsafe("names a global of more than 1,000 characters")
        m.damaged("the name of a global has no end")
    line = m.take(end + 1 - m.pos)[:-1]
    try:
        return line.decode()
    except UnicodeDecodeError:
        m.damaged("the name of a global is not UTF-8")


def _newobj_ex(m: Machine) -> None:
    cls, args, kwargs = _popped(m, 3)
    if kwargs and not m.grammar.lenient:
        m.unsafe("makes an object from keyword arguments")
    if kwargs and isinstance(args, tuple):
        args = (*args, kwargs)
    m.call(cls, args, makes=True)


def _build(m: Machine) -> None:
    state = m.pop()
    target = m.top()
    m.build(target, state)
    if isinstance(target, Stub) and target.kind in m.shapes:
        m.shapes[target.kind].take(m)


def _binpersid(m: Machine) -> None:
    if m.grammar.persistent is None:
        m.unsafe("asks for a persistent id")
    try:
        m.push_container(m.grammar.persistent(m.pop()))
    except Malformed as wrong:
        m.doubt(str(wrong))
        m.push_container(Stub("a persistent id"))


def _refuse(name: str) -> Callable[[Machine], object]:
    return lambda m: m.unsafe(f"holds the opcode {name}, which no writer of checkpoints uses")


_KNOWN: Mapping[int, Callable[[Machine], object]] = {
    # Constants, numbers and strings.
    0x4E: lambda m: m.push(None),  # NONE
    0x88: lambda m: m.push(True),  # NEWTRUE
    0x89: lambda m: m.push(False),  # NEWFALSE
    0x4B: lambda m: m.push(m.take(1)[0]),  # BININT1
    0x4D: lambda m: m.push(int.from_bytes(m.take(2), "little")),  # BININT2
    0x4A: lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),  # BININT
    0x8A: lambda m: _push_long(m, m.take(1)[0]),  # LONG1
    0x8B: lambda m: _push_long(m, int.from_bytes(m.take(4), "little", signed=True)),  # LONG4
    0x47: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    0x8C: lambda m: _push_text(m, 1),  # SHORT_BINUNICODE
    0x58: lambda m: _push_text(m, 4),  # BINUNICODE
    0x8D: lambda m: _push_text(m, 8),  # BINUNICODE8
    0x43: lambda m: m.push_bytes(_taken(m, 1)),  # SHORT_BINBYTES
    0x42: lambda m: m.push_bytes(_taken(m, 4)),  # BINBYTES
    0x8E: lambda m: m.push_bytes(_taken(m, 8)),  # BINBYTES8
    0x96: lambda m: m.push_bytes(bytearray(_taken(m, 8))),  # BYTEARRAY8
    # Containers.
    0x28: _mark,  # MARK
    0x29: lambda m: m.push(()),  # EMPTY_TUPLE
    0x85: lambda m: m.push_container((m.pop(),)),  # TUPLE1
    0x86: lambda m: m.push_container(_popped(m, 2)),  # TUPLE2
    0x87: lambda m: m.push_container(_popped(m, 3)),  # TUPLE3
    0x74: lambda m: m.push_container(tuple(m.pop_to_mark())),  # TUPLE
    0x5D: lambda m: m.push_container([]),  # EMPTY_LIST
    0x61: _append,  # APPEND
    0x65: _appends,  # APPENDS
    0x7D: lambda m: m.push_container({}),  # EMPTY_DICT
    0x73: _setitem,  # SETITEM
    0x75: _setitems,  # SETITEMS
    0x8F: lambda m: _push_set(m, set()),  # EMPTY_SET
    0x90: _additems,  # ADDITEMS
    0x91: lambda m: _push_set(m, frozenset(map(m.checked_key, m.pop_to_mark()))),  # FROZENSET
    # The stack and the memo.
    0x30: _pop,  # POP
    0x31: lambda m: m.pop_to_mark(),  # POP_MARK
    0x32: lambda m: m.push(m.top()),  # DUP
    0x94: Machine.memoize,  # MEMOIZE
    0x71: lambda m: m.remember(m.take(1)[0]),  # BINPUT
    0x72: lambda m: m.remember(int.from_bytes(m.take(4), "little")),  # LONG_BINPUT
    0x68: lambda m: m.push(m.recall(m.take(1)[0])),  # BINGET
    0x6A: lambda m: m.push(m.recall(int.from_bytes(m.take(4), "little"))),  # LONG_BINGET
    0x95: _frame,  # FRAME
    # Names, calls and objects.
    0x63: lambda m: m.push_global(_line(m), _line(m)),  # GLOBAL
    0x93: lambda m: m.push_global(*_popped(m, 2)),  # STACK_GLOBAL
    0x52: lambda m: m.call(*_popped(m, 2)),  # REDUCE
    0x81: lambda m: m.call(*_popped(m, 2), makes=True),  # NEWOBJ
    0x92: _newobj_ex,  # NEWOBJ_EX
    0x62: _build,  # BUILD
    0x51: _binpersid,  # BINPERSID
    # What reaches outside the pickle is never harmless.
    0x50: _refuse("PERSID"),
    0x69: _refuse("INST"),
    0x6F: _refuse("OBJ"),
    0x82: _refuse("EXT1"),
    0x83: _refuse("EXT2"),
    0x84: _refuse("EXT4"),
    0x97: _refuse("NEXT_BUFFER"),
    0x98: _refuse("READONLY_BUFFER"),
}


def _text_line(m: Machine) -> bytes:
    end = m.data.find(b"\n", m.pos, m.end)
    if end < 0:
        m.damaged("a line has no end")
    return m.take(end + 1 - m.pos)[:-1]


def _push_number(m: Machine, read: Callable[[str], object]) -> None:
    line = _text_line(m)
    try:
        if len(line) <= _MAX_DIGITS:
            m.push(read(line.decode("ascii")))
            return
        m.doubt(f"a number of {len(line):,} characters")
    except ValueError:
        m.doubt("a number is none")
    m.push(Stub("a number"))  # Python also reads other bases


def _int_of(line: str) -> object:
    return {"00": False, "01": True}[line] if line in ("00", "01") else int(line)


def _push_quoted(m: Machine) -> None:
    line = _text_line(m)
    if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
        m.damaged("a string is not quoted")
    try:
        m.push(codecs.escape_decode(line[1:-1])[0].decode("latin-1"))
    except ValueError:
        m.damaged("a string is damaged")


def _push_raw_text(m: Machine) -> None:
    try:
        m.push(_text_line(m).decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        m.damaged("a string is not raw Unicode")


def _push_slot(m: Machine, act: Callable[[int], object]) -> None:
    line = _text_line(m)
    if not (line.isdigit() and len(line) < 20):
        if m.grammar.lenient and re.fullmatch(rb"\s*[+-]?[0-9_]{1,4300}\s*", line):
            m.exceeded("a memo slot that no writer numbers so")
        m.damaged("the number of a memo slot is none")
    act(int(line))


def _dict_of_stack(m: Machine) -> None:
    items = m.pop_to_mark()
    made: dict[object, object] = {}
    m.set_items(made, items)
    m.push_container(made)


def _inst(m: Machine) -> None:
    module, name = _line(m), _line(m)
    args = tuple(m.pop_to_mark())
    m.push_global(module, name)
    m.call(m.pop(), args)


def _obj(m: Machine) -> None:
    items = m.pop_to_mark()
    if not items:
        m.damaged("an object has no class")
    m.call(items[0], tuple(items[1:]))


_MAX_DIGITS = 4_000
"""Python itself reads no number of more than 4,300 digits."""


def _not_an_opcode(m: Machine) -> None:
    m.damaged(f"0x{m.data[m.at]:02x} is no opcode of pickle protocols 2 to 5")


OPCODES: Opcodes = [_KNOWN.get(code, _not_an_opcode) for code in range(256)]


def _proto(m: Machine) -> None:
    protocol = m.take(1)[0]
    if protocol > 5:
        m.damaged(f"pickle protocol {protocol}; 0 to 5 can be read")


_ONLY_LENIENT: Mapping[int, Callable[[Machine], object]] = {
    0x80: _proto,  # PROTO, which may stand anywhere
    0x49: lambda m: _push_number(m, _int_of),  # INT
    0x4C: lambda m: _push_number(m, lambda line: int(line.rstrip("L"))),  # LONG
    0x46: lambda m: _push_number(m, float),  # FLOAT
    0x53: _push_quoted,  # STRING
    0x54: lambda m: m.push(_taken(m, 4).decode("latin-1")),  # BINSTRING
    0x55: lambda m: m.push(_taken(m, 1).decode("latin-1")),  # SHORT_BINSTRING
    0x56: _push_raw_text,  # UNICODE
    0x6C: lambda m: m.push_container(m.pop_to_mark()),  # LIST
    0x64: _dict_of_stack,  # DICT
    0x70: lambda m: _push_slot(m, m.remember),  # PUT
    0x67: lambda m: _push_slot(m, lambda slot: m.push(m.recall(slot))),  # GET
    0x69: _inst,  # INST
    0x6F: _obj,  # OBJ
}

LENIENT_OPCODES: Opcodes = [
    _ONLY_LENIENT.get(code) or _KNOWN.get(code, _not_an_opcode) for code in range(256)
]
"""With the opcodes of protocols 0 and 1, which every unpickler reads in any pickle."""
