"""Interpret a pickle without executing anything in it.

One interpreter of pickle's opcodes. A global stands for what
a `Grammar` states it stands for; a pickle that names any other is refused
with that name. Nothing is imported, nothing of the pickle is called, and what
comes out is plain values and inert objects.

Lengths, memo slots, nesting and the number of containers are checked before
anything is allocated, so time and memory grow with the size of the pickle and
with nothing that it states about itself.

`Machine` is the state of one reading: position, stack, marks and memo. What the objects mean is
defined in `dcp.metadata` and `pickles.values`.

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, Protocol

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.pickles.stubs import (
    Acts,
    Callee,
    Function,
    Grammar,
    InterpretedRow,
    Malformed,
    Memo,
    OrderedDictStub,
    Stub,
    StubRun,
    shown,
)

MAX_MARKS = 1_000
"""How deep containers may be open at once; torch's metadata opens eight."""

MAX_KEY_ITEMS = 64
MAX_TUPLE_KEYS = 4_096
"""Tuples of numbers can be made to collide: comparing all with all must stay cheap."""

FREE_CONTAINERS = 100_000
BYTES_PER_CONTAINER = 4
"""A container costs some 60 bytes of memory. One for every four bytes of pickle is
twice as dense as torch writes, and bounds memory at some 25 times the pickle."""

CHARS_PER_CONTAINER = 64

MIN_NESTED_BYTES = 8
"""No shorter pickle names a global and calls it."""

INT64 = 1 << 63
_PROTO, _STOP = 0x80, 0x2E

Opcodes = Sequence[Callable[["Machine"], object]]


class Shape(Protocol):
    """A shortcut for objects that come in thousands; see `formats.dcp.fast_path`."""

    def take(self, machine: Machine) -> None:
        """Take as many objects of the shape as follow, or none."""


Shapes = Callable[["Machine"], Mapping[str, Shape]]
"""Makes the shortcuts of one reading, by the kind of object after which each is tried."""


class Machine:
    """The state of one reading. `opcodes` is the table of what each byte does."""

    def __init__(
        self, data: bytes, grammar: Grammar, opcodes: Opcodes, memo: Memo | None = None
    ) -> None:
        self.data = data
        self.grammar = grammar
        self.opcodes = opcodes
        self.memo = memo or Memo()
        self.shapes: Mapping[str, Shape] = {}
        self.has_runs = False
        self.at = self.pos = 0
        self.end = len(data)
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.n_left = FREE_CONTAINERS + len(data) // BYTES_PER_CONTAINER
        self.taken: set[int] = set()
        self.tuple_keys = 0
        self.names_globals = False
        self.fault: MetadataUnreadable | None = None
        self.extra_slots: dict[int, object] = {}
        self.n_filled = 0
        self.frame_end = 0
        self.nested: list[bytes] = []
        self.others: list[object] = []
        self.cheap_keys = str | bytes | None | grammar.hashable

    def run(self) -> object:
        """Interpret the whole pickle: the one object that it builds."""
        value = self.run_first()
        if self.pos != self.end:
            self.damaged(f"{self.end - self.pos:,} bytes follow the end of the pickle")
        return value

    def run_first(self) -> object:
        """Interpret a pickle that more bytes may follow, from `pos` on."""
        data = self.data
        if data[:1] == b"\x80" or not self.grammar.lenient:
            if len(data) < 2 or data[0] != _PROTO:
                self.damaged("this does not begin as a pickle")
            if not (0 if self.grammar.lenient else 2) <= data[1] <= 5:
                self.damaged(f"pickle protocol {data[1]}; 2 to 5 can be read")
            self.pos = 2
        self.step_to_stop()
        value = self.pop()
        if self.stack or self.marks:
            self.doubt("the pickle ends with values left over")
        return value

    def step_to_stop(self) -> None:
        """Interpret up to and with the end mark, or up to `end` in a replay."""
        data, opcodes, end = self.data, self.opcodes, self.end
        while (at := self.pos) < end:
            self.at = at
            self.pos = at + 1
            code = data[at]
            if code == _STOP:
                return
            opcodes[code](self)
        if end == len(data):
            self.at = end
            self.damaged("the pickle is cut short: its end mark is missing")

    def damaged(self, what: str) -> NoReturn:
        """Raise `MetadataUnreadable` for the opcode at hand."""
        raise MetadataUnreadable(f"byte {self.at:,}: {what}")

    def doubt(self, what: str) -> None:
        """Note damage at which Python's unpickler goes on: what follows may still act.

        A lenient reading goes on, too, and fails with the first of these at its end.
        """
        if not self.grammar.lenient:
            self.damaged(what)
        self.fault = self.fault or MetadataUnreadable(f"byte {self.at:,}: {what}")

    def exceeded(self, what: str) -> NoReturn:
        """Stop at a limit: damage, or unsafe where names follow that an unpickler would import."""
        if self.grammar.lenient and (self.names_globals or _names_globals(self.data, self.pos)):
            raise MetadataUnsafe(
                f"names globals and cannot be read to its end: byte {self.at:,}: {what}"
            )
        self.damaged(what)

    def unsafe(self, what: str) -> NoReturn:
        """Raise `MetadataUnsafe` for the opcode at hand.

        What names no global runs nothing: bytes that are no pickle hold such opcodes by chance.
        """
        if self.grammar.lenient and not self.names_globals and self.data[:1] != b"\x80":
            self.damaged(what)
        raise MetadataUnsafe(f"{what} at byte {self.at:,}")

    def take(self, n_bytes: int) -> bytes:
        """The next `n_bytes`."""
        start = self.pos
        end = start + n_bytes
        if end > self.end:
            self.damaged(f"{n_bytes:,} bytes are to follow, {self.end - start:,} are left")
        if start < self.frame_end < end:
            self.crosses_frame()
        self.pos = end
        return self.data[start:end]

    def crosses_frame(self) -> NoReturn:
        """Refuse what begins in a frame and ends behind it.

        CPython's unpickler of files then skips the rest of the frame and reads other opcodes
        than those that stand there; no pickler writes it.
        """
        self.exceeded("a frame ends within what an opcode reads")

    def push(self, value: object) -> None:
        """Put one value on the stack."""
        self.stack.append(value)

    def push_container(self, value: object) -> None:
        """Put a container or an object on the stack, and count it."""
        self.n_left -= 1
        if self.n_left < 0:
            self.exceeded("more containers than a pickle of this size can need")
        self.stack.append(value)

    def push_run(
        self, run: StubRun, end: int, n_containers: int, values: Sequence[object] | None = None
    ) -> bool:
        """Continue at byte `end` with the values of a run on the stack, or the run itself.

        False where there may not be `n_containers` more.
        """
        if n_containers > self.n_left:
            return False
        self.n_left -= n_containers
        self.memo.skip(run)
        self.has_runs = True
        self.stack += [run] if values is None else values
        self.pos = end
        return True

    def pop(self) -> object:
        """Take the topmost value off the stack."""
        if self.stack and not isinstance(self.stack[-1], StubRun):
            return self.stack.pop()
        self.top()
        return self.stack.pop()

    def top(self) -> object:
        """The topmost value, left where it is."""
        if not self.stack:
            self.damaged("a value is missing")
        value = self.stack[-1]
        if isinstance(value, StubRun):
            self.stack[-1:] = self.values_of(value)
            return self.stack[-1]
        return value

    def pop_to_mark(self) -> list[object]:
        """Take everything above the topmost mark, and the mark."""
        return self.singly(self.pop_runs_to_mark())

    def pop_runs_to_mark(self) -> list[object]:
        """The same, with a `StubRun` left in place of its values."""
        if not self.marks:
            self.damaged("a mark is missing")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def singly(self, items: list[object]) -> list[object]:
        """`items`, with its values in place of each `StubRun`."""
        if not (self.has_runs and any(isinstance(item, StubRun) for item in items)):
            return items
        values: list[object] = []
        for item in items:
            values.extend(self.values_of(item) if isinstance(item, StubRun) else (item,))
        return values

    def values_of(self, run: StubRun) -> list[object]:
        """The values of a run, one by one."""
        values: list[object] = []
        for row in range(len(run.rows.starts)):
            values += self._replay(run, row).values
        return values

    def _replay(self, run: StubRun, row: int) -> InterpretedRow:
        """Interpret the bytes of one row of a run after all, once."""
        if row not in run.replayed:
            memo = Memo(self.memo, run.rows.first_slots[row])
            inner = Machine(self.data, self.grammar, self.opcodes, memo)
            inner.taken = self.taken
            inner.pos, inner.end = run.rows.starts[row], run.rows.ends[row]
            inner.step_to_stop()
            run.replayed[row] = InterpretedRow(inner.stack, memo.values)
        return run.replayed[row]

    def remember(self, slot: int) -> None:
        """Put the topmost value into the memo; writers fill the slots one after the other."""
        if slot == 1 and not self.memo.n_slots and self.grammar.lenient:
            self.memo.put(None)  # cPickle of Python 2 counts from 1
            self.n_filled = -1
        if slot != self.memo.n_slots or self.extra_slots:
            self.doubt(f"memo slot {slot:,} is written, {self.memo.n_slots:,} is next")
            self.n_filled += slot not in self.extra_slots and slot >= self.memo.n_slots
            self.extra_slots[slot] = self.top()
            return
        self.memo.put(self.top())

    def memoize(self) -> None:
        """Put the topmost value into the slot whose number is how many are filled."""
        self.remember(self.memo.n_slots + self.n_filled)

    def recall(self, slot: int) -> object:
        """What the memo holds."""
        if slot in self.extra_slots:
            return self.extra_slots[slot]
        if slot >= self.memo.n_slots:
            self.damaged(f"memo slot {slot:,} is read, {self.memo.n_slots:,} are filled")
        value = self.memo.get(slot)
        while isinstance(value, StubRun):
            run = value
            value = run.known_at(slot)
            if value is None:
                row = run.row_of(slot)
                return self._replay(run, row).slots[slot - run.rows.first_slots[row]]
        return value

    def set_items(self, items: list[object], target: object) -> None:
        """Put keys and values, one after the other, into the dict `target`."""
        if not isinstance(target, dict):
            pairs = self._pairs(items) if self.grammar.lenient else ()
            self._fill(target, pairs, "items are set on what is no dict")
            return
        if id(target) in self.taken:
            self.doubt("the state of an object is changed after it was given")
        for key, value in self._pairs(items):
            if not isinstance(key, StubRun):
                key = self.checked_key(key)
                if key in target and not self.grammar.lenient:
                    self.damaged("a dict has the same key twice")
            target[key] = value

    def _fill(self, target: object, values: Iterable[object], otherwise: str) -> None:
        """Put values into what a call returned: a deque, an object of a class that is a list."""
        if not self.grammar.lenient or not isinstance(target, Stub):
            self.doubt(otherwise)
            return
        try:
            target.fill(values)
        except Malformed:
            self.doubt(otherwise)
        except Acts as error:
            self.unsafe(str(error))

    def add_items(self, items: list[object], target: object) -> None:
        """Put `items` into the set `target`."""
        if not isinstance(target, set):
            self._fill(target, items, "values are added to what is no set")
            return
        target.update(map(self.checked_key, items))

    def _pairs(self, items: list[object]) -> Iterator[tuple[object, object]]:
        """Keys and values; a run of pairs goes in as one key, as long as it begins with one."""
        if not self.has_runs:
            if len(items) % 2:
                self.damaged("a key has no value")
            return zip(items[::2], items[1::2], strict=True)
        position = 0
        pairs: list[tuple[object, object]] = []
        while position < len(items):
            here = items[position]
            if isinstance(here, StubRun) and here.in_pairs:
                pairs.append((here, here))
                position += 1
                continue
            pair = items[position : position + 2]
            if any(isinstance(item, StubRun) for item in pair):
                return self._pairs(self.singly(items))
            if len(pair) < 2:
                self.damaged("a key has no value")
            pairs.append((pair[0], pair[1]))
            position += 2
        return iter(pairs)

    def build(self, target: object, state: object) -> None:
        """Give its state to an object."""
        if isinstance(target, Function):
            self.unsafe(f"sets attributes on {target.name}")
        if not isinstance(target, Stub | OrderedDictStub):
            if self.grammar.lenient and not isinstance(target, list | dict | set):
                return  # a value that stands for an object: its attributes are dropped
            self.doubt(f"a {type(target).__name__} is given a state")
            return
        if isinstance(target, Stub) and target.owns_state and isinstance(state, dict):
            if id(state) in self.taken:
                self.doubt("two objects are given one state")
            self.taken.add(id(state))
        try:
            target.build(state)
        except Malformed as wrong:
            self.doubt(str(wrong))
        except Acts as error:
            self.unsafe(str(error))

    def append_items(self, items: list[object], target: object) -> None:
        """Put `items` at the end of the list `target`."""
        if not isinstance(target, list):
            self._fill(target, items, "values are appended to what is no list")
            return
        target.extend(items)

    def checked_key(self, key: object) -> Hashable:
        """`key`, if it is of a kind whose hash and comparison are cheap."""
        if type(key) is str:
            return key
        if self.grammar.lenient:
            return self._key_or_stub(key)
        if isinstance(key, tuple):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS:
                self.damaged(f"more than {MAX_TUPLE_KEYS:,} keys are tuples")
            if len(key) <= MAX_KEY_ITEMS and all(map(self._is_cheap, key)):
                return key
        elif self._is_cheap(key):
            return key
        return self.damaged(f"a key of a dict is of type {type(key).__name__}")

    def _key_or_stub(self, key: object) -> Hashable:
        """`key`, or a stub that is equal to nothing else where hashing it could be slow."""
        if isinstance(key, tuple):
            self.tuple_keys += 1
            few = self.tuple_keys <= MAX_TUPLE_KEYS and len(key) <= MAX_KEY_ITEMS
            return key if few and all(map(self._is_cheap, key)) else Stub("a tuple")
        return key if self._is_cheap(key) else Stub(type(key).__name__)

    def _is_cheap(self, key: object) -> bool:
        if isinstance(key, int):
            return -INT64 <= key < 2 * INT64
        return isinstance(key, self.cheap_keys)

    def push_global(self, module: object, name: object) -> None:
        """Push what the grammar has for a global."""
        if type(module) is not str or type(name) is not str:
            self.unsafe("names a global by what are not two strings")
        if self.grammar.lenient and self.data[:1] != b"\x80" and not _MODULE.fullmatch(module):
            # A text that begins as a pickle of protocol 0 does; an unpickler would fail here.
            self.damaged(f"names the module {shown(module)}, which cannot be imported")
        self.names_globals = True
        known = self.grammar.names.get((module, name))
        if known is None:
            if self.grammar.other is None:
                self.unsafe(f"asks for {shown(module + '.' + name)}")
            try:
                other = self.grammar.other(module, name)
            except Acts as error:
                self.unsafe(str(error))
            self.others.append(other)
            self.push_container(other)
            return
        self.push(known)

    def call(self, function: object, args: object, *, makes: bool = False) -> None:
        """Push what stands for the result of a call; `makes` an object where a class is called."""
        if not isinstance(function, Callee):
            self.unsafe(f"calls {_described(function)}")
        if not isinstance(args, tuple):
            self.doubt("a call has no tuple of arguments")
            args = (args,)
        try:
            result = function.make(args) if makes else function.call(args)
        except Malformed as wrong:
            self.doubt(str(wrong))
            result = Stub("a call with other arguments than writers use")
        except Acts as error:
            self.unsafe(str(error))
        if isinstance(result, str | bytes | bytearray):
            # A few bytes of pickle can ask for the same long string again and again.
            self.n_left -= len(result) // CHARS_PER_CONTAINER
        if isinstance(result, bytes | bytearray):
            self.note_bytes(result)
        self.push_container(result)

    def push_bytes(self, data: bytes | bytearray) -> None:
        """Push bytes, which may be a pickle that a framework unpickles."""
        self.note_bytes(data)
        self.stack.append(data)

    def note_bytes(self, data: bytes | bytearray) -> None:
        """Keep bytes to be read as a pickle later, where the grammar asks for that."""
        if self.grammar.lenient and len(data) >= MIN_NESTED_BYTES:
            self.nested.append(bytes(data))


def _names_globals(data: bytes, start: int) -> bool:
    """Whether bytes hold the opcode of a global, at any place that could be one."""
    return data.find(b"\x93", start) >= 0 or _GLOBAL.search(data, start) is not None


_MODULE = re.compile(r"[\w.-]+")
_GLOBAL = re.compile(rb"[ci][A-Za-z_][\w.]{0,999}\n[A-Za-z_]")


def _described(value: object) -> str:
    return shown(str(value)) if isinstance(value, str | int) else f"a {type(value).__name__}"


def read_pickle(data: bytes, grammar: Grammar, shapes: Shapes | None = None) -> object:
    """The one object that the pickle `data` builds under `grammar`.

    `shapes` makes it faster and never different, except that lists and dicts then
    hold a `StubRun` in place of the objects that were taken in one go.

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


def _push_set(m: Machine, made: set[object] | frozenset[object]) -> None:
    m.n_left -= 3  # the empty set is four times as large as the empty list
    m.push_container(made)


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
    0x61: lambda m: m.append_items([m.pop()], m.top()),  # APPEND
    0x65: lambda m: m.append_items(m.pop_runs_to_mark(), m.top()),  # APPENDS
    0x7D: lambda m: m.push_container({}),  # EMPTY_DICT
    0x73: lambda m: m.set_items([*_popped(m, 2)], m.top()),  # SETITEM
    0x75: lambda m: m.set_items(m.pop_runs_to_mark(), m.top()),  # SETITEMS
    0x8F: lambda m: _push_set(m, set()),  # EMPTY_SET
    0x90: lambda m: m.add_items(m.pop_to_mark(), m.top()),  # ADDITEMS
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
    m.set_items(items, made)
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
