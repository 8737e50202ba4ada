"""What would this pickle build, if nothing in it could run?

One interpreter of pickle's opcodes, protocols 2 to 5. A global stands for what
a `Grammar` says it stands for; a pickle that asks for any other is refused
with that name. Nothing is imported, nothing of the pickle is called, and what
comes out is plain values and inert objects.

Lengths, memo indexes, nesting and the number of containers are checked before
anything is allocated, so time and memory grow with the size of the pickle and
with nothing that it says about itself.

What the objects mean is not known here: `metadata` and `values` say that.

Source: CPython 3.14 `Lib/pickletools.py` for the opcodes.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import NoReturn

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe

MAX_MARKS = 1_000
"""How deep containers may be open at once; torch's metadata opens eight."""

MAX_KEY_ITEMS = 64
MAX_TUPLE_KEYS = 4_096
"""Tuples of numbers can be made to collide: comparing all with all must stay cheap."""

FREE_CONTAINERS = 100_000
BYTES_PER_CONTAINER = 4
"""A container costs some 60 bytes of memory. One for every four bytes of pickle is
three times as dense as torch writes, and bounds memory at some 25 times the pickle."""

INT64 = 1 << 63


class Malformed(Exception):
    """What a grammar raises about arguments that do not fit; becomes `MetadataUnreadable`."""


@dataclass(frozen=True, slots=True)
class Function:
    """A global that the pickle may call: `call` is our own stand-in for it."""

    name: str
    call: Callable[[tuple[object, ...]], object]


class Inert:
    """An object of a class that the grammar knows: which class, and its state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: object = None

    def build(self, state: object) -> None:
        """Take the state that the pickle gives to the object."""
        if self.state is not None:
            raise Malformed(f"a {self.kind} is given its state twice")
        self.state = state


class Ordered(dict[object, object]):
    """A `collections.OrderedDict`. Attributes set on it are dropped."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Drop the attributes: torch puts its `_metadata` there."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the names in a pickle stand for.

    `names` maps (module, name) to a `Function` or to a plain value. `other` makes
    something of a name that is not there; without it such a name is unsafe.
    `persistent` does the same for persistent ids. `hashable` are the types that
    may be a dict's key beside str, bytes, int, bool, None and flat tuples of them.
    """

    names: Mapping[tuple[str, str], object]
    other: Callable[[str, str], object] | None = None
    persistent: Callable[[object], object] | None = None
    hashable: type | UnionType = NoneType
    max_int_bytes: int = 16


def read_pickle(data: bytes, grammar: Grammar) -> object:
    """The one object that the pickle `data` builds under `grammar`.

    Raises `MetadataUnsafe` for a name, a call or an opcode that the grammar does
    not have, `MetadataUnreadable` for anything that is not a whole, well-formed
    pickle. Both name the offset in bytes. Time and memory are linear in the size.
    """
    try:
        with collector_paused():
            return Machine(data, grammar).run()
    except MemoryError:
        raise MetadataUnreadable(
            f"{len(data):,} bytes of pickle need more memory than there is"
        ) from None


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


def shown(text: str) -> str:
    """A string out of a pickle, safe to print: escaped, and cut after 100 characters."""
    return ascii(text if len(text) <= 100 else text[:100] + "...")


class Machine:
    """The state of one reading: position, stack, marks and memo."""

    __slots__ = (
        "at",
        "data",
        "end",
        "grammar",
        "marks",
        "memo",
        "n_left",
        "pos",
        "stack",
        "tuple_keys",
    )

    def __init__(self, data: bytes, grammar: Grammar) -> None:
        self.data = data
        self.grammar = grammar
        self.at = self.pos = 0
        self.end = len(data)
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: list[object] = []
        self.n_left = FREE_CONTAINERS + len(data) // BYTES_PER_CONTAINER
        self.tuple_keys = 0

    def run(self) -> object:
        """Interpret from the protocol mark to the end mark."""
        data = self.data
        if len(data) < 2 or data[0] != _PROTO:
            self.damaged("this does not begin as a pickle")
        if not 2 <= data[1] <= 5:
            self.damaged(f"pickle protocol {data[1]}; 2 to 5 can be read")
        self.pos = 2
        self.run_until_stop()
        if self.pos != self.end:
            self.damaged(f"{self.end - self.pos:,} bytes follow the end of the pickle")
        if self.marks or len(self.stack) != 1:
            self.damaged("the pickle ends with values left over")
        return self.stack[0]

    def run_until_stop(self) -> None:
        """Interpret up to and with the end mark, or to `end` where there is none."""
        data, table = self.data, _TABLE
        while True:
            at = self.at = self.pos
            if at >= self.end:
                self.damaged("the pickle is cut short: its end mark is missing")
            self.pos = at + 1
            code = data[at]
            if code == _STOP:
                return
            table[code](self)

    def damaged(self, what: str) -> NoReturn:
        """Raise `MetadataUnreadable` for the opcode at hand."""
        raise MetadataUnreadable(f"byte {self.at:,}: {what}")

    def unsafe(self, what: str) -> NoReturn:
        """Raise `MetadataUnsafe` for the opcode at hand."""
        raise MetadataUnsafe(f"{what} at byte {self.at:,}")

    def take(self, n_bytes: int) -> bytes:
        """The next `n_bytes`."""
        start = self.pos
        end = start + n_bytes
        if end > self.end:
            self.damaged(f"{n_bytes:,} bytes are to follow, {self.end - start:,} are left")
        self.pos = end
        return self.data[start:end]

    def push(self, value: object) -> None:
        """Put one value on the stack."""
        self.stack.append(value)

    def push_container(self, value: object) -> None:
        """Put a container or an object on the stack, and count it."""
        self.n_left -= 1
        if self.n_left < 0:
            self.damaged("more containers than a pickle of this size can need")
        self.stack.append(value)

    def pop(self) -> object:
        """Take the topmost value off the stack."""
        if not self.stack:
            self.damaged("a value is missing")
        return self.stack.pop()

    def top(self) -> object:
        """The topmost value, left where it is."""
        if not self.stack:
            self.damaged("a value is missing")
        return self.stack[-1]

    def pop_to_mark(self) -> list[object]:
        """Take everything above the topmost mark, and the mark."""
        if not self.marks:
            self.damaged("a mark is missing")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Put the topmost value into the memo; writers number the slots one after the other."""
        if index != len(self.memo):
            self.damaged(f"memo slot {index:,} is written, {len(self.memo):,} is next")
        self.memo.append(self.top())

    def recall(self, index: int) -> None:
        """Push what the memo holds."""
        if index >= len(self.memo):
            self.damaged(f"memo slot {index:,} is read, {len(self.memo):,} are filled")
        self.stack.append(self.memo[index])

    def set_items(self, target: object, items: list[object]) -> None:
        """Put keys and values, one after the other, into the dict `target`."""
        if not isinstance(target, dict):
            self.damaged("items are set on what is no dict")
        if len(items) % 2:
            self.damaged("a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            key = self.checked_key(key)
            if key in target:
                self.damaged("a dict has the same key twice")
            target[key] = value

    def append_items(self, target: object, items: list[object]) -> None:
        """Put `items` at the end of the list `target`."""
        if not isinstance(target, list):
            self.damaged("values are appended to what is no list")
        target.extend(items)

    def checked_key(self, key: object) -> Hashable:
        """`key`, if it is of a kind whose hash and comparison are cheap."""
        if isinstance(key, tuple):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                self.damaged(f"more than {MAX_TUPLE_KEYS:,} keys are tuples")
            if len(key) <= MAX_KEY_ITEMS and all(map(self.is_cheap_key, key)):
                return key
        elif self.is_cheap_key(key):
            return key
        return self.damaged(f"a key of a dict is of type {type(key).__name__}")

    def is_cheap_key(self, key: object) -> bool:
        """A string, bytes, None, a number of 64 bits, or what the grammar adds."""
        if isinstance(key, int):
            return -INT64 <= key < 2 * INT64
        return isinstance(key, str | bytes | None | self.grammar.hashable)

    def global_named(self, module: object, name: object) -> None:
        """Push what the grammar has for a global."""
        if type(module) is not str or type(name) is not str:
            self.unsafe("names a global by what are not two strings")
        known = self.grammar.names.get((module, name))
        if known is None:
            if self.grammar.other is None:
                self.unsafe(f"asks for {shown(module + '.' + name)}")
            known = self.grammar.other(module, name)
        self.push(known)

    def call(self, function: object, args: object) -> None:
        """Push what the stand-in of a global makes of the arguments."""
        if not isinstance(function, Function):
            self.unsafe(f"calls {_described(function)}")
        if not isinstance(args, tuple):
            self.damaged(f"{function.name} is called without a tuple of arguments")
        try:
            self.push_container(function.call(args))
        except Malformed as wrong:
            self.damaged(str(wrong))


def _described(value: object) -> str:
    return shown(str(value)) if isinstance(value, str | int) else f"a {type(value).__name__}"


_PROTO, _STOP = 0x80, 0x2E
_Op = Callable[[Machine], None]
_TABLE: list[_Op] = []


def _not_an_opcode(m: Machine) -> None:
    m.damaged(f"0x{m.data[m.at]:02x} is no opcode of pickle protocols 2 to 5")


_TABLE.extend([_not_an_opcode] * 256)


def _opcode(code: int) -> Callable[[_Op], _Op]:
    def register(op: _Op) -> _Op:
        _TABLE[code] = op
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
    items = m.pop_to_mark()
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
    items = m.pop_to_mark()
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
    m.remember(len(m.memo))


@_opcode(0x71)  # BINPUT
def _binput(m: Machine) -> None:
    m.remember(m.take(1)[0])


@_opcode(0x72)  # LONG_BINPUT
def _long_binput(m: Machine) -> None:
    m.remember(int.from_bytes(m.take(4), "little"))


@_opcode(0x68)  # BINGET
def _binget(m: Machine) -> None:
    m.recall(m.take(1)[0])


@_opcode(0x6A)  # LONG_BINGET
def _long_binget(m: Machine) -> None:
    m.recall(int.from_bytes(m.take(4), "little"))


@_opcode(0x95)  # FRAME
def _frame(m: Machine) -> None:
    n_bytes = int.from_bytes(m.take(8), "little")
    if n_bytes > m.end - m.pos:
        m.damaged(f"a frame of {n_bytes:,} bytes begins, {m.end - m.pos:,} are left")


# Names, calls and objects.


@_opcode(0x63)  # GLOBAL
def _global(m: Machine) -> None:
    module, name = _line(m), _line(m)
    m.global_named(module, name)


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
    m.global_named(module, name)


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
    if isinstance(target, Function):
        m.unsafe(f"sets attributes on {target.name}")
    if not isinstance(target, Inert | Ordered):
        m.damaged(f"a {type(target).__name__} is given a state")
    try:
        target.build(state)
    except Malformed as wrong:
        m.damaged(str(wrong))


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
