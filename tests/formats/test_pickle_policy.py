"""Harmless values of the standard library are read; a call that acts is refused at any depth."""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import ipaddress
import itertools
import logging
import operator
import os
import pathlib
import pickle
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import time
import types
import typing
import uuid
import warnings
import zipfile
import zoneinfo

import numpy as np
import pytest
from every_case import all_cases
from made_pickles import called, dict_of, list_of, made, named, pickled, text, tuple_of

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.values import (
    decode,
    decode_all,
    decode_state,
    decode_value,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Call:
    """An object whose pickle calls a function where it is loaded."""

    def __init__(self, function: object, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


Point = collections.namedtuple("Point", "x y")


class OwnList(list):
    pass


class OwnDict(dict):
    pass


class OwnSet(set):
    pass


class OwnFrozen(frozenset):
    pass


class OwnInt(int):
    pass


class OwnText(str):
    pass


class OwnDefault(collections.defaultdict):
    pass


class WithSlots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class WithKeywords:
    def __new__(cls, *, size: int):
        made = super().__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self):
        return (), {"size": 3}


class WithSetter:
    def __reduce__(self):
        return collections.OrderedDict, (), {"a": 1}, None, iter([("k", 1)])


class Parent:
    def __init__(self) -> None:
        self.child = types.SimpleNamespace(parent=self)


def with_attributes(made: object) -> object:
    made.note = "set on it"  # type: ignore[attr-defined]
    return made


def logger() -> logging.Logger:
    return logging.getLogger("test.policy")


STANDARD = {
    "deque": collections.deque([1, 2], 5),
    "deque of deques": collections.deque([collections.deque([1])]),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "nested defaultdict": collections.defaultdict(dict, a=collections.defaultdict(int, b=2)),
    "Counter": collections.Counter("abca"),
    "OrderedDict": collections.OrderedDict(a=1),
    "ChainMap": collections.ChainMap({"a": 1}, {"b": 2}),
    "UserDict": collections.UserDict(a=1),
    "UserList": collections.UserList([1]),
    "array": array.array("d", [1.0, 2.0]),
    "set": {1, 2},
    "frozenset": frozenset({1, "a"}),
    "range": range(1, 9, 2),
    "slice": slice(1, None, 2),
    "complex": 1 + 2j,
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"abc"),
    "empty bytes": [b"", bytearray()],
    "long integer": 2**5000,
    "Ellipsis": [..., NotImplemented, None],
    "types": [int, list, type(None), type(...), dict[str, int], int | str],
    "typing": [typing.Any, list[int], typing.List[int]],  # noqa: UP006
    "datetime": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
    "date and time": [datetime.date(2024, 1, 2), datetime.time(3), datetime.timedelta(4)],
    "zone": zoneinfo.ZoneInfo("UTC"),
    "Decimal": decimal.Decimal("1.5"),
    "decimal context": decimal.Context(prec=5),
    "Fraction": fractions.Fraction(1, 3),
    "UUID": uuid.uuid5(uuid.NAMESPACE_DNS, "x"),
    "ipaddress": [ipaddress.ip_address("10.0.0.1"), ipaddress.ip_network("10.0.0.0/8")],
    "paths": [pathlib.PurePosixPath("/a/b"), pathlib.PureWindowsPath("c:\\x"), pathlib.Path("a")],
    "path as key": {pathlib.PurePosixPath("a"): 1, "a": 2},
    "namespace": argparse.Namespace(a=1, out=pathlib.PurePosixPath("/a")),
    "SimpleNamespace": types.SimpleNamespace(a=1),
    "random": [random.getstate(), random.Random(3)],
    "struct_time": time.gmtime(0),
    "partial of a class": functools.partial(dict, a=1),
    "partial of a partial": functools.partial(functools.partial(int, base=2), "1"),
    "itemgetter": operator.itemgetter(1),
    "pattern": re.compile("a+", re.IGNORECASE),
    "exceptions": [ValueError("x", 1), OSError(2, "missing"), KeyError("k")],
    "with attributes": with_attributes(ValueError("x")),
    "filled by iterators": WithSetter(),
    "BytesIO": io.BytesIO(b"abc"),
    "StringIO": io.StringIO("abc"),
    "logger": logger(),
    "NormalDist": statistics.NormalDist(1, 2),
    "iterators": [iter([1, 2]), itertools.count(3), enumerate(["a"]), reversed([1, 2])],
    "keys of every kind": {
        (1, (2, 3)): 1,
        frozenset({1}): 2,
        decimal.Decimal(1): 3,
        2**90: 4,
        1 + 1j: 5,
        uuid.uuid5(uuid.NAMESPACE_DNS, "k"): 6,
        b"b": 7,
        None: 8,
        1.5: 9,
        datetime.date(2024, 1, 1): 10,
        range(3): 11,
    },
    "many tuples as keys": {(n, n + 1): n for n in range(5_000)},
    "a deep list": functools.reduce(lambda inner, _: [inner], range(150), 1),
    "names of what could act": {"os.system": "posix\nsystem", "exec": b"cos\nsystem"[:3]},
    "numbers": [0, -1, 255, 256, 65_536, 2**31, 2**63, -(2**70), 0.5, float("inf"), True],
    "texts": ["", "é", "\n'\"\\", "\ud800", "x" * 300],
}

OWN = {
    "enum": Color.RED,
    "int enum": Level.LOW,
    "flag": Bits.A | Bits.B,
    "namedtuple": Point(1, 2),
    "list": OwnList([1, 2]),
    "dict": OwnDict(a=1),
    "set": OwnSet({1}),
    "frozenset": OwnFrozen({1}),
    "int": OwnInt(3),
    "text": OwnText("a"),
    "defaultdict": OwnDefault(list, a=[1]),
    "object that holds itself": Parent(),
    "list with attributes": with_attributes(OwnList([1])),
}

LIBRARIES = {
    "numpy arrays": [np.arange(3), np.array(["a"]), np.array([{"a": 1}], dtype=object)],
    "numpy scalars": [np.float32(1), np.int64(2), np.datetime64("2024-01-01"), np.bool_(True)],
    "numpy dtypes": [np.dtype("f4"), np.dtype([("a", "i4")])],
    "numpy masked": np.ma.masked_array([1, 2], mask=[True, False]),
    "numpy generators": [np.random.get_state(), np.random.default_rng(1), np.random.RandomState(1)],
    "an exception with a function": RuntimeError("x", np.zeros),
    "numpy seed": np.random.SeedSequence(3),
    "numpy ufunc and class": [np.float32, np.ndarray],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([2]), torch.strided],
    "torch layout": [torch.finfo, torch.Tensor],
    "torch dtypes as keys": {torch.float32: 1},
    "torch generator": torch.get_rng_state(),
    "module": torch.nn.Linear(2, 2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.ones(2, 2).to_sparse(),
    "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "sampler": torch.utils.data.SequentialSampler(range(3)),
}


def saved(value: object, how: str) -> bytes:
    """The pickle that `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    if how == "legacy":
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=False)
        return file.getvalue()
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_of_the_standard_library_are_read_without_a_doubt(protocol):
    with all_cases() as case:
        for name, value in STANDARD.items():
            with case(name):
                try:
                    data = pickle.dumps(value, protocol)
                except (TypeError, pickle.PicklingError):
                    continue  # iterators, and slots in protocols 0 and 1
                assert decode(data).unknown == ()
                decode_state(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_values_of_numpy_and_torch_are_read_without_a_doubt(protocol):
    with all_cases() as case:
        for name, value in LIBRARIES.items():
            with case(name):
                assert decode(pickle.dumps(value, protocol)).unknown == ()
                for how in ("zip", "legacy"):
                    assert decode_all(saved(value, how)).unknown == ()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_class_of_the_run_is_unknown_and_named(protocol):
    with all_cases() as case:
        for name, value in {**OWN, "slots": WithSlots(), "keywords": WithKeywords(size=1)}.items():
            with case(name):
                try:
                    data = pickle.dumps({"args": [value]}, protocol)
                except TypeError:
                    continue
                unknown = decode(data).unknown
                assert unknown
                assert all(one.startswith(__name__) for one in unknown), unknown


def test_what_was_filled_after_the_call_is_kept():
    value = decode_value(pickle.dumps(collections.deque([1, 2], 5)))
    assert isinstance(value, Opaque)
    assert value.items == [1, 2]
    assert decode_value(pickle.dumps(collections.defaultdict(list, step=3))) == {"step": 3}


def test_a_state_that_is_written_again_keeps_no_default_dict():
    value = decode_state(pickle.dumps(collections.defaultdict(list, step=3)))
    assert isinstance(value, Opaque)


def archive_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


ACTING = {
    "os.system": Call(os.system, "true"),
    "os.popen": Call(os.popen, "true"),
    "exec": Call(exec, "1"),
    "eval": Call(eval, "1"),
    "open": Call(open, "/etc/hostname"),
    "__import__": Call(__import__, "os"),
    "compile": Call(compile, "1", "a", "eval"),
    "import_module": Call(importlib.import_module, "os"),
    "subprocess": Call(subprocess.Popen, ["true"]),
    "check_output": Call(subprocess.check_output, ["true"]),
    "rmtree": Call(shutil.rmtree, "/nothing"),
    "socket": Call(socket.create_connection, ("localhost", 1)),
    "attrgetter": Call(operator.attrgetter, "system"),
    "methodcaller": Call(operator.methodcaller, "system", "true"),
    "getattr of a value": Call(getattr, "text", "upper"),
    "getattr of a library class": Call(getattr, collections.OrderedDict, "fromkeys"),
    "partial": functools.partial(os.system, "true"),
    "partial, called": Call(functools.partial(operator.truediv, 1), 0),
    "map": Call(map, os.system, ["true"]),
    "filter of a function": Call(filter, operator.not_, [1]),
    "iter of a function": Call(iter, operator.truediv, 1),
    "reduce": Call(functools.reduce, operator.add, ["os", ".system"]),
    "default factory": collections.defaultdict(os.getcwd),
    "pickle.loads": Call(pickle.loads, b"N."),
    "torch.load": Call(torch.load, "/nothing"),
    "torch.hub": Call(torch.hub.load, "a", "b"),
    "torch.jit": Call(torch.jit.load, "/nothing"),
    "torch, a function": Call(torch.from_file, "/nothing"),
    "numpy.load": Call(np.load, "/nothing"),
    "numpy, a function": Call(np.fromiter, [1], int),
    "a library function that is not listed": Call(sys.intern, "a"),
    "a class made": Call(type, "Made", (), {"a": 1}),
    "a function as a value": {"activation": os.system},
    "a rebuild function": Call(torch._tensor._rebuild_from_type_v2, os.system, int, ("true",), {}),
    "a function passed to a rebuild": Call(
        torch._tensor._rebuild_from_type_v2, torch.from_file, int, ("/nothing",), {}
    ),
    "setattr": Call(setattr, OwnList(), "a", 1),
    "to an unknown class": Call(OwnList, sys.intern),
    "in bytes": {"rank_0": pickle.dumps({"deep": [Call(os.system, "true")]})},
    "in bytes, with more behind": [pickle.dumps(Call(os.system, "true")) + b"more"],
    "in bytes, protocol 0": [pickle.dumps(Call(os.system, "true"), 0)],
    "in bytes of bytes": pickle.dumps([pickle.dumps([pickle.dumps(Call(os.system, "true"))])]),
    "in a file in bytes": [archive_of(Call(os.system, "true"))],
    "in a buffer": io.BytesIO(pickle.dumps(Call(os.system, "true"))),
    "in an array": np.frombuffer(pickle.dumps(Call(os.system, "true")), np.uint8),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_acts_is_refused_by_every_protocol(protocol):
    with all_cases() as case:
        for name, value in ACTING.items():
            with case(name):
                try:
                    data = pickle.dumps({"model": 1, "extra": [{"deep": value}]}, protocol)
                except TypeError:
                    continue
                for read in (decode, decode_all, decode_state):
                    with pytest.raises(MetadataUnsafe):
                        read(data)


SYSTEM = b"cposix\nsystem\n"
BY_HAND = {
    "INST": b"(S'true'\niposix\nsystem\n.",
    "OBJ": b"(" + SYSTEM + b"S'true'\no.",
    "GLOBAL": SYSTEM + b"(S'true'\ntR.",
    "of Python 2": b"cos\nsystem\n(S'true'\ntR.",
    "commands": b"ccommands\ngetoutput\n(S'true'\ntR.",
    "EXT1": b"\x80\x02\x82\x01.",
    "a module through another": pickled(called(named("torch.serialization", "os.system"), b"N")),
    "a name that another module imports": pickled(called(named("shop.tools", "system"), b"N")),
    "a module as a name": pickled(named("shop.tools", "subprocess")),
    "the globals of a function": pickled(named("shop", "Thing.__init__.__globals__")),
    "CodeType": pickled(called(named("types", "CodeType"), b"N")),
    "FunctionType": pickled(called(named("types", "FunctionType"), b"N")),
    "copyreg": pickled(
        called(named("copyreg", "__newobj__"), named("subprocess", "Popen"), text("true"))
    ),
    "an attribute of a call": pickled(
        called(named("builtins", "getattr"), called(named("shop", "Thing")), text("run"))
    ),
    "a name that is put together": pickled(
        called(named("builtins", "str"), text("posix")) + text("system") + b"\x93"
    ),
    "attributes of a class": pickled(named("shop", "Thing") + dict_of(text("a"), b"N") + b"b"),
    "a call of what a call returned": pickled(called(called(named("shop", "Thing")), b"N")),
    "items of a module": pickled(named("shop", "Thing") + b"(" + text("a") + b"Nu"),
    "a call before damage": SYSTEM + b"(S'true'\ntR\xff",
}


def test_what_acts_is_refused_in_pickles_made_by_hand():
    with all_cases() as case:
        for name, data in BY_HAND.items():
            with case(name), pytest.raises(MetadataUnsafe):
                decode_all(data)


FOREIGN = {
    "class": pickled(made(named("shop.config", "Config"), text("a"), b"N")),
    "called class": pickled(called(named("shop.config", "Mode"), text("train"))),
    "member of an enumeration, Python 3.11": pickled(
        called(named("builtins", "getattr"), named("shop.config", "Mode"), text("TRAIN"))
    ),
    "nested class": pickled(called(named("shop.config", "Outer.Inner"), b"N")),
    "function": pickled(called(named("shop.config", "rebuild"), b"N")),
    "class of a package that can act": pickled(made(named("pandas.shop", "Odd"), text("a"), b"N")),
    "list": pickled(list_of(named("shop.config", "Config") + b")\x81(K\x01K\x02e")),
    "keywords": pickled(named("shop", "Config") + b")" + dict_of(text("a"), b"N") + b"\x92"),
    "state and slots": pickled(named("shop", "Config") + b")\x81" + tuple_of(b"N", b"}") + b"b"),
}


def test_a_class_that_is_not_installed_is_unknown():
    with all_cases() as case:
        for name, data in FOREIGN.items():
            with case(name):
                (unknown,) = decode(data).unknown
                assert unknown.startswith(("shop", "pandas"))


ODDITIES = {
    "a memo slot out of order": b"Nq\x050",
    "a protocol in the middle": b"N0\x80\x05",
    "a number in another base": b"I0x10\n0",
    "a long number": b"L" + b"1" * 4_001 + b"L\n0",
    "a state for a list": b"]Nb0",
    "values for bytes": b"\x96" + bytes([1, *[0] * 7]) + b"a(K\x01e0",
    "another codec": called(named("_codecs", "encode"), text("a"), text("utf-8")) + b"0",
    "a size of a list": called(named("torch", "Size"), list_of(b"K\x02")) + b"0",
    "bytes of numbers": called(named("builtins", "bytes"), list_of(b"K\x02")) + b"0",
    "a value left over": b"N",
    "many containers": b"]" * 200_000,
    "deep containers": b"(" * 1_001,
}
"""What Python's unpickler accepts and no writer writes: it goes on behind them."""


def test_nothing_in_front_of_a_call_keeps_it_from_being_found():
    call = SYSTEM + b"(S'true'\ntR."
    nested = called(named("torch.storage", "_load_from_bytes"), b"C" + bytes([len(call)]) + call)
    with all_cases() as case:
        for name, oddity in ODDITIES.items():
            for what, data in (("call", call), ("in bytes", nested + b".")):
                for head in (b"", b"\x80\x02", b"\x80\x04"):
                    with case(f"{name}, {what}, {head}"), pytest.raises(MetadataUnsafe):
                        decode_all(head + oddity + data)


def test_a_frame_hides_no_bytes():
    # From a file, CPython skips the two zeros that are left of the frame after `G`.
    call = SYSTEM + b"(S'true'\ntR."
    number = b"G" + bytes(8)
    for data in (
        b"\x80\x04\x95" + (3).to_bytes(8, "little") + number + b"\x86\x93L1L\n0" + call,
        b"\x95" + (2).to_bytes(8, "little") + b"I1\n0" + call,
        b"\x80\x04\x95" + (4).to_bytes(8, "little") + b"\x95" + (9).to_bytes(8, "little") + call,
    ):
        with pytest.raises(MetadataUnsafe):
            decode_all(data)
    long = pickle.dumps({"a": ["x" * 100_000, b"y" * 100_000], "b": [*range(90_000)]}, 5)
    assert b"\x95" in long
    assert decode(long).unknown == ()


def test_memo_slots_are_counted_as_an_unpickler_counts_them():
    # MEMOIZE takes the number of filled slots, whatever their numbers are.
    for writes, slot in ((b"Nq\x050", 1), (b"Nq\x010", 1)):
        data = b"\x80\x04" + writes + b"cshop\nThing\n\x940h" + bytes([slot]) + b"(NtR(NtR."
        with pytest.raises(MetadataUnsafe, match="calls an object"):
            decode_all(data)


def zip_of(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")
        for name, data in (*members, ("archive/version", b"3\n")):
            archive.writestr(name, data)
    return file.getvalue()


def tar_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def with_wrong_checksum(data: bytes) -> bytes:
    """The archive with another CRC-32 of its first member, in both places."""
    central = data.index(b"PK\x01\x02")
    changed = bytearray(data)
    for place in (14, central + 16):
        changed[place] ^= 0xFF
    return bytes(changed)


def foreign_archives(data: bytes) -> dict[str, bytes]:
    """Archives that `torch.load` reads and `torch.save` does not write."""
    other = ("archive/data.pkl", pickle.dumps({}))
    return {
        "plain": zip_of(("archive/data.pkl", data)),
        "compressed": zip_of(("archive/data.pkl", data), compression=zipfile.ZIP_DEFLATED),
        "capital letters": zip_of(("archive/DATA.PKL", data)),
        "capital letters and another": zip_of(("archive/DATA.PKL", data), other),
        "two of one name": zip_of(("archive/data.pkl", data), other),
        "bytes behind it": zip_of(("archive/data.pkl", data)) + b"behind" * 9,
        "a wrong checksum": with_wrong_checksum(
            zip_of(("archive/data.pkl", data), compression=zipfile.ZIP_DEFLATED)
        ),
        "tar": tar_of(storages=data, tensors=pickle.dumps(0), pickle=pickle.dumps(0)),
        "tar, the last member": tar_of(a=b"(", storages=b"N.", tensors=b"N.", pickle=data),
    }


def test_pickles_in_archives_that_torch_did_not_write_are_read():
    every = foreign_archives(pickle.dumps(Call(os.system, "true"))).items()
    with all_cases() as case:
        for (name, data), is_loaded in itertools.product(every, (True, False)):
            holder = called(LOAD, sized(data)) if is_loaded else sized(data)
            with case(f"{name}, {is_loaded}"), pytest.raises(MetadataUnsafe):
                decode_all(pickled(holder))
    for data in foreign_archives(pickle.dumps({"step": 1})).values():
        assert decode_all(pickle.dumps([data])).unknown == ()


def sized(data: bytes) -> bytes:
    return b"B" + len(data).to_bytes(4, "little") + data


LOAD = named("torch.storage", "_load_from_bytes")
GENERATOR = named("numpy.random._pickle", "__generator_ctor")
NUMBERS = list_of(*(b"K" + bytes([byte]) for byte in SYSTEM + b"(S'true'\ntR."))
INDIRECT = {
    "bytes that are computed": called(LOAD, called(named("builtins", "bytes"), NUMBERS)),
    "a byte array that is computed": called(LOAD, called(named("builtins", "bytearray"), NUMBERS)),
    "an array that is computed": called(LOAD, called(named("array", "array"), text("B"), NUMBERS)),
    "bytes of a text": called(
        LOAD, called(named("builtins", "bytearray"), text("cos\nsystem\n(VX\ntR."), text("ascii"))
    ),
    "numpy calls a constructor": called(GENERATOR, text("1"), named("networkx", "read_gpickle")),
    "numpy calls a constructor of the run": called(GENERATOR, text("1"), named("shop", "run")),
    "numpy imports a name": called(
        GENERATOR,
        text("true"),
        called(named("numpy.core", "_ufunc_reconstruct"), text("os"), text("system")),
    ),
    "sympy evaluates its arguments": called(named("sympy", "Poly"), text("x")),
    "torch.fx executes source": called(named("torch.fx.graph_module", "GraphModule"), b"N"),
    "a template": called(named("jinja2.environment", "TemplateModule"), b"N"),
    "an iterator that calls": called(
        named("builtins", "list"), called(named("torch.utils.data", "DataLoader"), b"N")
    ),
    "a harmless class that gets a function": called(
        named("torch.utils.data", "DataLoader"), named("sympy", "sympify")
    ),
    "a harmless class that gets a function by its keyword": named("torch.utils.data", "DataLoader")
    + b")"
    + dict_of(text("collate_fn"), named("networkx", "read_gpickle"))
    + b"\x92",
    "a metaclass": called(named("enum", "EnumType"), text("Made"), b")", b"}"),
}


def test_what_calls_or_imports_for_the_pickle_is_refused():
    with all_cases() as case:
        for name, value in INDIRECT.items():
            with case(name), pytest.raises(MetadataUnsafe):
                decode_all(pickled(value))


def test_functions_of_numpy_that_are_stored_as_values_are_read():
    for module, name in (("numpy.core.umath", "add"), ("numpy._core._multiarray_umath", "add")):
        data = called(named("numpy.core", "_ufunc_reconstruct"), text(module), text(name))
        assert decode(pickled(data)).unknown == ()
    assert decode(pickle.dumps({"activation": np.add}, 2)).unknown == ()


TEXTS = (
    "cost of a run, and open source of it\n" + "a long line of text " * 40 + "\nthe end.\n",
    "Copyright (c) 2024 The authors" + ", all rights reserved" * 6 + "\nc \nos.system\n",
    "(c) somebody\nimport os\nos.system('true')\n",
    "Notes: import os.path\nopen\n",
)


def test_a_text_is_no_danger():
    with all_cases() as case:
        for text_file in TEXTS:
            with case(text_file[:20]), pytest.raises(MetadataUnreadable):
                decode_all(text_file.encode())


def test_damage_is_no_danger():
    with pytest.raises(MetadataUnreadable):
        decode(pickle.dumps([1, 2])[:-1])


def random_value(chance: random.Random, depth: int, planted: object = None) -> object:
    """A structure of standard values, with `planted` somewhere in it."""
    leaves = [*STANDARD.values(), 1, "a", 2.5, b"x", None]
    if depth == 0:
        return chance.choice(leaves) if planted is None else planted
    n = chance.randrange(1, 4)
    items = [random_value(chance, chance.randrange(depth)) for _ in range(n)]
    at = chance.randrange(n)
    if planted is not None:
        items[at] = random_value(chance, depth - 1, planted)
    keyed = {f"k{number}": item for number, item in enumerate(items)}
    nested = pickle.dumps if planted is None else list
    return chance.choice(
        (
            lambda: items,
            lambda: tuple(items),
            lambda: keyed,
            lambda: collections.deque(items),
            lambda: collections.defaultdict(list, keyed),
            lambda: collections.OrderedDict(keyed),
            lambda: collections.ChainMap(keyed, {}),
            lambda: types.SimpleNamespace(**keyed),
            lambda: argparse.Namespace(**keyed),
            lambda: collections.UserList(items),
            lambda: functools.partial(dict, items),
            lambda: np.array([*items, None], dtype=object),
            lambda: ValueError(*items),
            lambda: {"rank": nested(items)},
        )
    )()


SEEDS = range(60)


def test_random_structures_of_standard_values_are_read_and_planted_calls_are_not():
    calls = [call for name, call in ACTING.items() if "protocol" not in name]
    n_planted = 0
    with all_cases() as case:
        for seed in SEEDS:
            chance = random.Random(seed)
            sound = random_value(chance, 5)
            bad = random_value(chance, 5, chance.choice(calls))
            for protocol in range(2, 6):
                with case(f"seed {seed}, protocol {protocol}"):
                    try:
                        assert decode(pickle.dumps(sound, protocol)).unknown == ()
                        data = pickle.dumps(bad, protocol)
                    except (TypeError, pickle.PicklingError):
                        continue
                    n_planted += 1
                    with pytest.raises(MetadataUnsafe):
                        decode(data)
            for how in ("zip", "legacy"):
                with case(f"seed {seed}, {how}"):
                    try:
                        data = saved(bad, how)
                        assert decode_all(saved(sound, how)).unknown == ()
                    except (TypeError, pickle.PicklingError):
                        continue
                    with pytest.raises(MetadataUnsafe):
                        decode_all(data)
    assert n_planted > 100
