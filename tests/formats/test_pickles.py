"""The interpreter of pickles: what it reads, and the place that its errors name."""

from __future__ import annotations

import collections
import gc
import io
import pickle
from pathlib import Path

import pytest
from made_pickles import called, dict_of, list_of, made, named, number, pickled, text, tuple_of

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.pickles.reading import read_pickle
from ckptctl.formats.pickles.stubs import Function, Grammar, Stub

GRAMMAR = Grammar(
    {
        ("shop", "Thing"): Function("Thing", lambda args: Stub("Thing")),
        ("shop", "PRICE"): 42,
        ("collections", "OrderedDict"): Function("OrderedDict", lambda args: {}),
    },
    hashable=Stub,
)

VALUES = [
    None,
    True,
    False,
    0,
    255,
    256,
    65_535,
    65_536,
    -1,
    2**31 - 1,
    -(2**31),
    2**31,
    2**63,
    -(2**63) - 1,
    1.5,
    float("inf"),
    "",
    "a",
    "é—€\n\x94",
    "\ud800",
    "x" * 255,
    "x" * 256,
    b"",
    b"\x00" * 255,
    b"y" * 256,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1],
    list(range(2_500)),
    {},
    {"a": 1},
    {i: str(i) for i in range(2_500)},
    {(1, "a"): {None: [()]}, b"b": {True: False}},
    [["shared"]] * 3,
]


def pickles_of(value: object) -> list[bytes]:
    """As C and as Python write it, in each protocol from 2 on."""
    written = [pickle.dumps(value, protocol) for protocol in range(2, 6)]
    for protocol in range(2, 6):
        file = io.BytesIO()
        pickle._Pickler(file, protocol).dump(value)
        written.append(file.getvalue())
    return written


def refusal(data: bytes) -> str:
    with pytest.raises(MetadataUnreadable) as refused:
        read_pickle(data, GRAMMAR)
    return refused.value.message


def alarm(data: bytes) -> str:
    with pytest.raises(MetadataUnsafe) as refused:
        read_pickle(data, GRAMMAR)
    return refused.value.message


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_plain_values_come_back_from_every_protocol_and_pickler(value):
    for data in pickles_of(value):
        if data[1] == 2 and holds_bytes(value):
            continue
        read = read_pickle(data, GRAMMAR)
        assert read == value
        assert type(read) is type(value)


def holds_bytes(value: object) -> bool:
    """Protocol 2 has no bytes: `test_values` has the call that it makes of them."""
    return isinstance(value, bytes) or (isinstance(value, dict) and b"b" in value)


def test_sets_and_byte_arrays_come_back():
    for value in ({1, "a"}, frozenset({1, (2, 3)}), bytearray(b"abc")):
        assert read_pickle(pickle.dumps(value, 5), GRAMMAR) == value


def test_what_is_shared_is_one_object():
    first, second, third = read_pickle(pickle.dumps([["x"]] * 3), GRAMMAR)
    assert first is second is third


def test_more_than_256_memo_slots_are_told_apart():
    texts = [f"text {i}" for i in range(70_000)]
    assert read_pickle(pickle.dumps([texts, texts[::-1]]), GRAMMAR) == [texts, texts[::-1]]


def test_a_known_class_gives_an_inert_object_with_its_state():
    thing = read_pickle(pickled(made(named("shop", "Thing"), text("a"), number(1))), GRAMMAR)
    assert isinstance(thing, Stub)
    assert (thing.kind, thing.state) == ("Thing", {"a": 1})


def test_a_state_is_given_to_one_object_and_left_alone_from_then_on():
    thing = named("shop", "Thing") + b")\x81"
    state = b"}\x94(" + text("a") + number(1) + b"u"
    changed = thing + state + b"bh\x00(" + text("b") + number(2) + b"u0"
    assert "the state of an object is changed after it was given" in refusal(pickled(changed))
    shared = thing + state + b"b0" + thing + b"h\x00b"
    assert "two objects are given one state" in refusal(pickled(shared))


def test_a_global_that_is_a_value_is_that_value():
    assert read_pickle(pickled(named("shop", "PRICE")), GRAMMAR) == 42
    assert read_pickle(pickled(b"cshop\nPRICE\n"), GRAMMAR) == 42


def test_an_ordered_dict_comes_back_as_a_dict():
    ordered = collections.OrderedDict(a=1, b=2)
    for data in pickles_of(ordered):
        assert read_pickle(data, GRAMMAR) == {"a": 1, "b": 2}


def test_the_collector_is_left_as_it_was():
    assert gc.isenabled()
    read_pickle(pickled(b"N"), GRAMMAR)
    assert gc.isenabled()
    gc.disable()
    try:
        read_pickle(pickled(b"N"), GRAMMAR)
        assert not gc.isenabled()
    finally:
        gc.enable()
    refusal(b"")
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte 0: this does not begin as a pickle"),
        (b"PK\x03\x04", "byte 0: this does not begin as a pickle"),
        (b"\x80", "byte 0: this does not begin as a pickle"),
        (b"\x80\x01N.", "byte 0: pickle protocol 1; 2 to 5 can be read"),
        (b"\x80\x06N.", "byte 0: pickle protocol 6; 2 to 5 can be read"),
        (b"\x80\x04N", "byte 3: the pickle is cut short: its end mark is missing"),
        (b"\x80\x04N.N", "byte 3: 1 bytes follow the end of the pickle"),
        (b"\x80\x04.", "byte 2: a value is missing"),
        (b"\x80\x04NN.", "byte 4: the pickle ends with values left over"),
        (b"\x80\x04N(N.", "byte 5: the pickle ends with values left over"),
        (b"\x80\x04\xff.", "byte 2: 0xff is no opcode of pickle protocols 2 to 5"),
        (b"\x80\x04I1\n.", "byte 2: 0x49 is no opcode of pickle protocols 2 to 5"),
        (b"\x80\x04\x80\x04N.", "byte 2: 0x80 is no opcode of pickle protocols 2 to 5"),
        (b"\x80\x04M\x01", "byte 2: 2 bytes are to follow, 1 are left"),
        (b"\x80\x04X\xff\xff\xff\xff.", "byte 2: 4,294,967,295 bytes are to follow, 1 are left"),
        (b"\x80\x04\x8b\xff\xff\xff\xff.", "byte 2: an integer of -1 bytes"),
        (b"\x80\x04\x8a\x11" + bytes(17) + b".", "byte 2: an integer of 17 bytes"),
        (b"\x80\x04\x8c\x01\xff.", "byte 2: a string is not UTF-8"),
        (b"\x80\x04h\x00.", "byte 2: memo slot 0 is read, 0 are filled"),
        (b"\x80\x04j\xff\xff\xff\xff.", "byte 2: memo slot 4,294,967,295 is read, 0 are filled"),
        (b"\x80\x04Nq\x01.", "byte 3: memo slot 1 is written, 0 is next"),
        (b"\x80\x04Nr\x00\x00\x00\x80.", "byte 3: memo slot 2,147,483,648 is written, 0 is next"),
        (b"\x80\x04N\x94q\x00.", "byte 4: memo slot 0 is written, 1 is next"),
        (b"\x80\x04\x94.", "byte 2: a value is missing"),
        (b"\x80\x04t.", "byte 2: a mark is missing"),
        (b"\x80\x04N\x86.", "byte 3: a value is missing"),
        (b"\x80\x04NNa.", "byte 4: values are appended to what is no list"),
        (b"\x80\x04(Ne.", "byte 4: a value is missing"),
        (b"\x80\x04N(Nu.", "byte 5: items are set on what is no dict"),
        (b"\x80\x04}(Nu.", "byte 5: a key has no value"),
        (b"\x80\x04}NNsNNs.", "byte 8: a dict has the same key twice"),
        (b"\x80\x04}]Ns.", "byte 5: a key of a dict is of type list"),
        (b"\x80\x04](N\x90.", "byte 5: values are added to what is no set"),
        (
            b"\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.",
            "byte 2: a frame of 255 bytes begins, 2",
        ),
        (b"\x80\x04cshop\nPRICE", "byte 2: the name of a global has no end"),
        (b"\x80\x04c\xff\nPRICE\n.", "byte 2: the name of a global is not UTF-8"),
        (b"\x80\x04N}b.", "byte 4: a NoneType is given a state"),
        (
            b"\x80\x04" + named("shop", "Thing") + b"NR.",
            "byte 23: a call has no tuple of arguments",
        ),
        (b"\x80\x04" + named("shop", "Thing") + b")R}b}b.", "a Thing is given its state twice"),
    ],
)
def test_damage_is_named_with_the_byte_where_it_was_met(data, message):
    assert message in refusal(data)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (named("posix", "system"), "asks for 'posix.system' at byte 23"),
        (b"cposix\nsystem\n", "asks for 'posix.system' at byte 2"),
        (named("shop", "Thing.call"), "asks for 'shop.Thing.call' at byte 26"),
        (
            named("shop", "\x1b[2J" + "x" * 500),
            r"asks for 'shop.\x1b[2J" + "x" * 91 + "...' at byte",
        ),
        (number(7) + text("os") + b"\x93", "names a global by what are not two strings at byte 12"),
        (called(number(7)), "calls '7' at byte 7"),
        (called(named("shop", "PRICE")), "calls '42' at byte"),
        (called(called(named("shop", "Thing"))), "calls a Stub at byte"),
        (text("posix.system") + b")\x81", "calls 'posix.system' at byte"),
        (named("shop", "Thing") + b")" + dict_of(text("a"), b"N") + b"\x92", "keyword arguments"),
        (named("shop", "Thing") + dict_of(text("a"), b"N") + b"b", "sets attributes on Thing"),
        (text("id") + b"Q", "asks for a persistent id"),
        (b"Pid\n", "holds the opcode PERSID"),
        (b"(iposix\nsystem\n", "holds the opcode INST"),
        (b"(" + named("shop", "Thing") + b"o", "holds the opcode OBJ"),
        (b"\x82\x01", "holds the opcode EXT1"),
        (b"\x83\x01\x00", "holds the opcode EXT2"),
        (b"\x84\x01\x00\x00\x00", "holds the opcode EXT4"),
        (b"\x97", "holds the opcode NEXT_BUFFER"),
        (b"N\x98", "holds the opcode READONLY_BUFFER"),
    ],
)
def test_what_reaches_outside_is_unsafe_and_named(body, message):
    assert message in alarm(pickled(body))


def test_a_frame_is_no_border_for_what_lies_in_it():
    # Readers differ here: one that trusts frames sees other opcodes than one that does not.
    inside = b"C\x05cshop"
    data = b"\x80\x04\x95" + (3).to_bytes(8, "little") + inside + b"."
    assert read_pickle(data, GRAMMAR) == b"cshop"


def test_containers_can_be_open_a_thousand_deep_and_no_deeper():
    assert read_pickle(pickled(b"(" * 1_000 + b"t" * 1_000), GRAMMAR) is not None
    assert "more than 1,000 containers" in refusal(pickled(b"(" * 1_001 + b"t" * 1_001))


def test_keys_are_cheap_to_hash_and_to_compare():
    flat = tuple_of(*[number(i) for i in range(64)])
    assert read_pickle(pickled(dict_of(flat, b"N")), GRAMMAR) == {tuple(range(64)): None}
    for key in (
        tuple_of(*[number(0)] * 65),
        tuple_of(b")"),
        tuple_of(list_of()),
        number(1 << 64),
        number(-(1 << 63) - 1),
        b"G" + bytes(8),
        b"}",
    ):
        assert "a key of a dict is of type" in refusal(pickled(dict_of(key, b"N")))


def test_objects_that_the_grammar_allows_are_keys_each_for_itself():
    thing = made(named("shop", "Thing"))
    read = read_pickle(pickled(dict_of(thing, number(1), thing, number(2))), GRAMMAR)
    assert isinstance(read, dict)
    assert list(read.values()) == [1, 2]


def test_the_interpreter_needs_no_unpickler():
    package = Path(read_pickle.__code__.co_filename).parent
    for source in package.glob("*.py"):
        assert "import pickle" not in source.read_text(), source
