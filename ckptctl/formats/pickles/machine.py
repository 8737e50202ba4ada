"""The state of the pickle interpreter: stack, memo, position.

Position, stack, marks and memo, and the checks that each step makes before it
allocates anything. What each opcode does is in `reading`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, Protocol

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.pickles.stubs import (
    Acts,
    Callee,
    Function,
    Grammar,
    Malformed,
    Memo,
    Ordered,
    Replayed,
    Run,
    Stub,
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

    __slots__ = (
        "at",
        "cheap_keys",
        "data",
        "end",
        "extra_slots",
        "fault",
        "frame_end",
        "grammar",
        "has_runs",
        "marks",
        "memo",
        "n_filled",
        "n_left",
        "names_globals",
        "nested",
        "opcodes",
        "others",
        "pos",
        "shapes",
        "stack",
        "taken",
        "tuple_keys",
    )

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
        self, run: Run, end: int, n_containers: int, values: Sequence[object] | None = None
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
        if self.stack and not isinstance(self.stack[-1], Run):
            return self.stack.pop()
        self.top()
        return self.stack.pop()

    def top(self) -> object:
        """The topmost value, left where it is."""
        if not self.stack:
            self.damaged("a value is missing")
        value = self.stack[-1]
        if isinstance(value, Run):
            self.stack[-1:] = self.values_of(value)
            return self.stack[-1]
        return value

    def pop_to_mark(self) -> list[object]:
        """Take everything above the topmost mark, and the mark."""
        return self.singly(self.pop_runs_to_mark())

    def pop_runs_to_mark(self) -> list[object]:
        """The same, with a `Run` left in place of its values."""
        if not self.marks:
            self.damaged("a mark is missing")
        items, self.stack = self.stack, self.marks.pop()
        return items

    def singly(self, items: list[object]) -> list[object]:
        """`items`, with its values in place of each `Run`."""
        if not (self.has_runs and any(isinstance(item, Run) for item in items)):
            return items
        values: list[object] = []
        for item in items:
            values.extend(self.values_of(item) if isinstance(item, Run) else (item,))
        return values

    def values_of(self, run: Run) -> list[object]:
        """The values of a run, one by one."""
        values: list[object] = []
        for row in range(len(run.rows.starts)):
            values += self._replay(run, row).values
        return values

    def _replay(self, run: Run, row: int) -> Replayed:
        """Interpret the bytes of one row of a run after all, once."""
        if row not in run.replayed:
            memo = Memo(self.memo, run.rows.first_slots[row])
            inner = Machine(self.data, self.grammar, self.opcodes, memo)
            inner.taken = self.taken
            inner.pos, inner.end = run.rows.starts[row], run.rows.ends[row]
            inner.step_to_stop()
            run.replayed[row] = Replayed(inner.stack, memo.values)
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
        while isinstance(value, Run):
            run = value
            value = run.known_at(slot)
            if value is None:
                row = run.row_of(slot)
                return self._replay(run, row).slots[slot - run.rows.first_slots[row]]
        return value

    def set_items(self, target: object, items: list[object]) -> None:
        """Put keys and values, one after the other, into the dict `target`."""
        if not isinstance(target, dict):
            pairs = self._pairs(items) if self.grammar.lenient else ()
            self._fill(target, pairs, "items are set on what is no dict")
            return
        if id(target) in self.taken:
            self.doubt("the state of an object is changed after it was given")
        for key, value in self._pairs(items):
            if not isinstance(key, Run):
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

    def add_items(self, target: object, items: list[object]) -> None:
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
            if isinstance(here, Run) and here.in_pairs:
                pairs.append((here, here))
                position += 1
                continue
            pair = items[position : position + 2]
            if any(isinstance(item, Run) for item in pair):
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
        if not isinstance(target, Stub | Ordered):
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

    def append_items(self, target: object, items: list[object]) -> None:
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
