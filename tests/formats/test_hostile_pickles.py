"""Pickles made to attack whoever reads them: nothing of them runs, and none costs much.

Each is decoded as metadata, as the value of a record and as a record's tensor,
in a process of its own with little memory, which notes whatever happens
(`watched_decoder`). The payloads would create a file. That they still would is
shown on Python's own unpickler: otherwise the rest proves nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from every_case import all_cases
from made_pickles import (
    bytes_entry,
    called,
    dcp_class,
    dict_of,
    list_of,
    made,
    metadata,
    named,
    number,
    pickled,
    size,
    text,
    tuple_of,
    weight,
)

WATCHED = Path(__file__).parent.parent / "watched_decoder.py"
LIMIT_MIB = 128
"""Python itself and the decoders take some 60 of them."""

CANARY = "canary"
RUN = f"touch {CANARY}"
OPEN = f"open({CANARY!r}, 'w')"


@dataclass(frozen=True)
class Outcome:
    kind: str
    message: str
    events: tuple[str, ...]


Outcomes = Mapping[tuple[str, str], Outcome]


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.args


SYSTEM = named("posix", "system")
CALL = called(SYSTEM, text(RUN))
BENIGN = weight()[2:-1]


def from_python() -> Iterator[tuple[str, bytes]]:
    """What `__reduce__` gives, in every protocol."""
    for protocol in range(6):
        for name, call in {
            "system": Calls(os.system, RUN),
            "popen": Calls(subprocess.Popen, ["touch", CANARY]),
            "eval": Calls(eval, OPEN),
            "exec": Calls(exec, OPEN),
        }.items():
            yield f"{name}-{protocol}", pickle.dumps(call, protocol)


@cache
def payloads() -> Mapping[str, bytes]:
    """What would create the canary, or reach out in another way."""
    return {
        **dict(from_python()),
        "global": pickled(b"cposix\nsystem\n" + tuple_of(text(RUN)) + b"R"),
        "getattr": pickled(called(named("builtins", "getattr"), named("torch", "Size"), text("x"))),
        "inst": pickled(b"(" + text(RUN) + b"iposix\nsystem\n"),
        "obj": pickled(b"(" + SYSTEM + text(RUN) + b"o"),
        "newobj": pickled(SYSTEM + tuple_of(text(RUN)) + b"\x81"),
        "newobj-ex": pickled(SYSTEM + tuple_of(text(RUN)) + b"}\x92"),
        "called-then-popped": pickled(CALL + b"0" + BENIGN),
        "called-under-a-mark": pickled(b"(" + CALL + b"1" + BENIGN),
        "after-the-end": weight() + pickled(CALL),
        "before-an-undecodable-byte": b"\x80\x04" + CALL + b"\xff",
        "before-a-missing-end": b"\x80\x04" + CALL,
        "as-setstate": pickled(
            made(dcp_class("Metadata"), text("__setstate__"), SYSTEM) + text(RUN) + b"b"
        ),
        "as-attribute-of-a-class": pickled(
            dcp_class("MetadataIndex") + dict_of(text("__reduce__"), SYSTEM) + b"b"
        ),
        "as-slots": pickled(
            dcp_class("Metadata") + b")\x81N" + dict_of(text("f"), CALL) + b"\x86b"
        ),
        "dotted-name": pickled(called(named("torch", "serialization.os.system"), text(RUN))),
        "dotted-module": pickled(called(named("torch.serialization", "os.system"), text(RUN))),
        "from-the-memo": pickled(
            text("posix") + b"\x940" + text("system") + b"\x940h\x00h\x01\x93" + CALL[-40:]
        ),
        "as-a-key": pickled(dict_of(CALL, b"N")),
        "as-a-key-in-a-tuple": pickled(dict_of(tuple_of(CALL), b"N")),
        "in-a-field": pickled(made(dcp_class("Metadata"), text("version"), CALL)),
        "in-a-frame": pickled(b"\x95" + len(CALL).to_bytes(8, "little") + CALL),
        "in-a-frame-too-short": pickled(b"\x95" + (2).to_bytes(8, "little") + CALL),
        "inner-pickle": pickled(called(named("torch.storage", "_load_from_bytes"), b"C\x01.")),
        "encode": pickled(called(named("_codecs", "encode"), text(RUN), text("unicode_escape"))),
        "decode": pickled(called(named("_codecs", "decode"), text(RUN), text("zlib"))),
        "partial": pickled(called(called(named("functools", "partial"), SYSTEM, text(RUN)))),
        "methodcaller": pickled(
            called(called(named("operator", "methodcaller"), text("system"), text(RUN)), SYSTEM)
        ),
        "locate": pickled(called(named("pydoc", "locate"), text("os.system"))),
        "write-text": pickled(called(named("pathlib", "Path.write_text"), text(CANARY), text(""))),
        "torch-load": pickled(called(named("torch", "load"), text(CANARY))),
        "torch-hub": pickled(called(named("torch.hub", "load"), text("x/y"), text("z"))),
        "torch-jit": pickled(called(named("torch.jit", "load"), text(CANARY))),
        "copyreg": pickled(called(named("copyreg", "_reconstructor"), SYSTEM, SYSTEM, b"N")),
        "class-that-is-a-key": weight(
            ranges=dict_of(made(named("my_planner", "Index"), text("fqn"), text("w")), b"N")
        ),
        "string-of-a-class": weight(fqn=named("my_planner", "Name") + b")\x81"),
        "number-as-module": pickled(number(42) + text("os") + b"\x93" + tuple_of(text(RUN)) + b"R"),
        "string-as-function": pickled(called(text("posix.system"), text(RUN))),
        "extension-1": pickled(b"\x82\x01"),
        "extension-2": pickled(b"\x83\x01\x00"),
        "extension-4": pickled(b"\x84\x01\x00\x00\x00"),
        "persistent-id": pickled(b"P" + RUN.encode() + b"\n"),
        "binary-persistent-id": pickled(text(RUN) + b"Q"),
        "next-buffer": pickled(b"\x97"),
        "readonly-buffer": pickled(b"N\x98"),
        "items-on-no-dict": pickled(text(RUN) + b"(" + text("a") + CALL + b"u"),
        "a-tar-archive": b"sys_info\0" + bytes(503) + pickled(CALL),
        "a-very-long-name": pickled(named("\x1b]0;" + "x" * 1_000_000, "\n" * 1_000)),
    }


MIB = 1 << 20
N_PARTS = MIB // 4
"""With `LIMIT_MIB`, each may take some 190 bytes."""


def lengths() -> Iterator[tuple[str, bytes]]:
    """Opcodes that say they are followed by more than there is."""
    for exponent in (30, 31, 32, 40, 62, 63):
        for name, opcode, width in (
            ("text", b"X", 4),
            ("text8", b"\x8d", 8),
            ("bytes", b"B", 4),
            ("bytes8", b"\x8e", 8),
            ("bytearray8", b"\x96", 8),
            ("integer", b"\x8b", 4),
            ("frame", b"\x95", 8),
            ("put", b"Nr", 4),
            ("get", b"j", 4),
        ):
            if exponent < 8 * width:
                said = (1 << exponent).to_bytes(width, "little")
                yield f"{name}-of-2-to-{exponent}", b"\x80\x04" + opcode + said + b"."


def deep_by_memo(n_levels: int) -> bytes:
    """A list in a list, each fetched from the memo, so that the stack stays flat."""
    body = b"]\x940"
    for level in range(1, n_levels):
        body += b"]\x94j" + (level - 1).to_bytes(4, "little") + b"a0"
    return pickled(body + b"j" + (n_levels - 1).to_bytes(4, "little"))


@cache
def bombs() -> Mapping[str, bytes]:
    """What would take all memory, or time without end."""
    laughs = b"](" + b"N" * 9 + b"e"
    for _ in range(9):
        laughs = b"](" + laughs + b"2" * 8 + b"e"
    return {
        **dict(lengths()),
        "nested-tuples": pickled(b")" + b"\x85" * MIB),
        "nested-lists": pickled(b"]" * (MIB // 2) + b"a" * (MIB // 2 - 1)),
        "nested-by-memo": deep_by_memo(20_000),
        "nested-marks": b"\x80\x04" + b"(" * MIB + b".",
        "hash-of-a-tuple": pickled(b"}" + b"N" + b"2\x86" * 40 + b"Ns"),
        "hash-of-a-frozen-set": pickled(b"}" + b"(N\x91" + b"(2\x91" * 40 + b"Ns"),
        "laughs": pickled(laughs),
        "laughs-of-a-planner": metadata(planner=laughs),
        "a-list-in-itself": pickled(b"]\x94h\x00a"),
        "a-planner-in-itself": metadata(planner=b"]\x94h\x00a"),
        "keys-that-are-tuples": pickled(
            b"}("
            + b"".join(tuple_of(number(i * (2**61 - 1) % 2**63)) + b"N" for i in range(20_000))
            + b"u"
        ),
        "keys-of-one-hash": pickled(
            b"}(" + b"".join(number(i * (2**61 - 1)) + b"N" for i in range(1, 20_000)) + b"u"
        ),
        "digits": b"\x80\x02I" + b"9" * 4_000_000 + b"\n.",
        "an-integer-of-a-megabyte": b"\x80\x04\x8b"
        + MIB.to_bytes(4, "little")
        + b"\xff" * MIB
        + b".",
        "put-by-digits": b"\x80\x02Np" + b"9" * MIB + b"\n.",
        "get-by-digits": b"\x80\x02g" + b"9" * MIB + b"\n.",
        "a-thousand-dimensions": weight(
            shape=called(named("torch", "Size"), tuple_of(*[b"K\x01"] * 1_000))
        ),
        "more-elements-than-there-are": weight(shape=size(2**40, 2**40)),
        "a-path-of-one-long-part-often": pickled(
            named("pathlib", "PosixPath") + b"(" + text("x" * MIB) + b"2" * 1_000 + b"tR"
        ),
        "one-path-made-often": metadata(
            planner=list_of(
                text("x" * 60_000),
                b"\x85\x94",
                named("pathlib", "PosixPath") + b"\x94",
                b"h\x01h\x00R" * 50_000,
            )
        ),
        "one-state-for-many": metadata(
            planner=list_of(
                dict_of(*(part for i in range(1_000) for part in (text(str(i)), b"N"))) + b"\x94",
                dcp_class("StorageMeta") + b"\x94",
                b"h\x01)\x81h\x00b" * 50_000,
            )
        ),
        "one-string-encoded-often": pickled(
            text("x" * MIB)
            + b"\x940"
            + named("_codecs", "encode")
            + b"\x940"
            + text("latin1")
            + b"\x940]("
            + b"h\x01h\x00h\x02\x86R" * 2_000
            + b"e"
        ),
        "entries": metadata(
            *(part for i in range(30_000) for part in (text(str(i)), bytes_entry()))
        ),
        "nothing-but-none": pickled(b"N" * N_PARTS),
        "nothing-but-memo": pickled(b"N" + b"\x94" * N_PARTS),
        "nothing-but-lists": pickled(b"]" * N_PARTS),
        "nothing-but-dicts": pickled(b"}" * N_PARTS),
        "nothing-but-sets": pickled(b"\x8f" * N_PARTS),
        "nothing-but-frozen-sets": pickled(b"(\x91" * N_PARTS),
        "nothing-but-texts": pickled(b"\x8c\x02ab" * N_PARTS),
        "nothing-but-objects": pickled(
            dcp_class("BytesStorageMetadata") + b"\x94" + b"h\x00)\x81" * N_PARTS
        ),
        "zeros": bytes(MIB),
        "ones": b"\xff" * MIB,
    }


def decode_watched(folder: Path) -> None:
    """Decode each pickle with each decoder; the canary would be in the working folder."""
    pickles, work = folder / "pickles", folder / "work"
    pickles.mkdir()
    work.mkdir()
    for name, data in {**payloads(), **bombs(), "benign": weight()}.items():
        (pickles / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, str(WATCHED), str(LIMIT_MIB), str(pickles)],
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3_000:]
    assert not list(work.iterdir()), "a payload ran"
    (folder / "outcomes").write_text(done.stdout)


@pytest.fixture(scope="module")
def outcomes(once: Callable[..., Path]) -> Outcomes:
    """What became of each pickle in each decoder."""
    found = {}
    for line in (once("hostile-pickles", decode_watched) / "outcomes").read_text().splitlines():
        name, decoder, kind, message, _, events = json.loads(line)
        found[name, decoder] = Outcome(kind, message, tuple(events))
    return found


LOADS = """
import os, pickle, sys
sys.modules["torch"] = None  # two seconds, and what a payload calls before is run
for payload in {payloads!r}:
    try:
        pickle.loads(payload)
    except Exception:
        pass
    os.remove({canary!r})
"""


def test_the_watched_process_sees_what_python_s_own_unpickler_would_run(tmp_path):
    names = ("system-4", "eval-2", "global", "called-then-popped", "in-a-frame", "as-a-key")
    script = LOADS.format(payloads=[payloads()[name] for name in names], canary=CANARY)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_benign_metadata_decodes_where_it_is_watched(outcomes):
    assert outcomes["benign", "metadata"] == Outcome("read", "Metadata", ())


def test_decoding_imports_opens_and_starts_nothing(outcomes):
    names = {*payloads(), *bombs(), "benign"}
    assert outcomes.keys() == {(n, d) for n in names for d in ("metadata", "value", "tensor")}
    assert {each: found.events for each, found in outcomes.items() if found.events} == {}


def test_no_payload_is_taken_for_metadata_or_for_a_tensor(outcomes):
    with all_cases() as case:
        for each in product(payloads(), ("metadata", "tensor")):
            with case(each):
                outcome = outcomes[each]
                assert outcome.kind in ("unsafe", "unreadable")
                assert len(outcome.message) < 300
                assert outcome.message.isprintable()


@pytest.mark.parametrize(
    ("name", "asked_for"),
    [
        *((f"system-{protocol}", "asks for 'posix.system'") for protocol in range(2, 6)),
        *((f"popen-{protocol}", "asks for 'subprocess.Popen'") for protocol in range(3, 6)),
        ("eval-2", "asks for '__builtin__.eval'"),
        ("eval-4", "asks for 'builtins.eval'"),
        ("called-then-popped", "asks for 'posix.system'"),
        ("before-an-undecodable-byte", "asks for 'posix.system'"),
        ("as-attribute-of-a-class", "asks for 'posix.system'"),
        ("dotted-name", "asks for 'torch.serialization.os.system'"),
        ("inner-pickle", "asks for 'torch.storage._load_from_bytes'"),
        ("string-as-function", "calls 'posix.system'"),
        ("number-as-module", "names a global by what are not two strings"),
        ("in-a-frame-too-short", "asks for 'posix.system'"),
        ("a-very-long-name", r"asks for '\x1b]0;xxx"),
    ],
)
def test_the_name_that_was_asked_for_is_told(outcomes, name, asked_for):
    assert outcomes[name, "metadata"].kind == "unsafe"
    assert asked_for in outcomes[name, "metadata"].message


MEANT_WELL = {"laughs-of-a-planner", "a-planner-in-itself", "entries"}
"""Metadata that is odd and no more: it is read, at no great cost."""


def test_no_bomb_goes_off(outcomes):
    assert {name for name in bombs() if outcomes[name, "metadata"].kind == "read"} == MEANT_WELL
    assert [name for name in bombs() if outcomes[name, "tensor"].kind == "read"] == []


@pytest.mark.parametrize(
    "name",
    [
        "nested-tuples",
        "nested-lists",
        "a-path-of-one-long-part-often",
    ],
)
def test_values_are_bounded_too(outcomes, name):
    assert outcomes[name, "value"].kind == "unreadable"


def test_what_names_globals_and_exceeds_a_limit_is_unsafe(outcomes):
    assert outcomes["one-string-encoded-often", "value"].kind == "unsafe"


@pytest.mark.parametrize(
    "name",
    [
        "nested-by-memo",
        "laughs",
        "a-list-in-itself",
        "hash-of-a-tuple",
        "keys-that-are-tuples",
        "keys-of-one-hash",
    ],
)
def test_what_sound_values_may_hold_too_is_read_and_costs_little(outcomes, name):
    assert outcomes[name, "value"].kind == "read"
