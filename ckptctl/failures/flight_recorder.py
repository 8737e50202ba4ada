"""Read the dumps of torch's flight recorder: the calls of each rank to each process group.

A dump is a pickle of plain data, or JSON. It is read without torch; a pickle that holds
anything but plain data is refused. `stalled_collectives` compares the ranks.

Source: torch 2.4 to 2.13 `torch/csrc/distributed/c10d/FlightRecorder*.hpp`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckptctl.data_classes import dataclass
from ckptctl.errors import CkptctlError
from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.formats.pickles.reading import read_pickle
from ckptctl.formats.pickles.stubs import Grammar

MAX_BYTES = 256 << 20
_MAX_RANKS = 1 << 20
_PICKLE = b"\x80"
_RANK = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle|bin))?$")
_PLAIN_DATA = Grammar({})
_OWN_FRAMES = re.compile(r"(?:^|/)(?:torch|site-packages|dist-packages)/|^<frozen ")
_PAIR = re.compile(r"(?:send|recv) (\d{1,7})(->|<-)(\d{1,7})")


class NotADump(Exception):
    """The file is not a dump of the flight recorder."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that a rank called on a process group.

    `sequence` counts the collectives of the group, or for point-to-point operations those
    between the two ranks. `done` is true if the recorder saw it end. `frame` is the first
    line of the program below torch, None if the dump has no stacks. `pair` are the
    positions of sender and receiver in the group.
    """

    group: str
    description: str
    operation: str
    sequence: int
    done: bool
    inputs: str
    outputs: str
    types: str
    n_in: int
    n_out: int
    frame: str | None
    pair: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Dump:
    """The record of one rank; `members` are the ranks of each process group, by name."""

    rank: int
    file: str
    calls: tuple[Call, ...]
    members: Mapping[str, tuple[int, ...]]


def may_be_dump(name: str, head: bytes) -> bool:
    """Whether a file may be a dump, by its name and first bytes."""
    return bool(_RANK.search(name)) and (
        (head.startswith(_PICKLE) and (b"pg_config" in head or b"entries" in head))
        or (head.lstrip()[:1] == b"{" and b'"pg_config"' in head and b'"version"' in head)
    )


def read_dump(name: str, data: bytes) -> Dump:
    """The dump in a file whose name ends with the rank.

    Raises `NotADump` if the data is something else, damaged or unsafe.
    """
    found = _RANK.search(name)
    document = _decoded(name, data)
    if found is None or not isinstance(document, dict):
        raise NotADump(f"{name}: not a dump of the flight recorder")
    entries = document.get("entries", [])
    config = document.get("pg_config", {})
    if not isinstance(entries, list) or not isinstance(config, dict):
        raise NotADump(f"{name}: not a dump of the flight recorder")
    calls = tuple(call for entry in entries if (call := _call(entry)) is not None)
    return Dump(int(found[1]), name, calls, dict(_members(config)))


def _decoded(name: str, data: bytes) -> object:
    try:
        if data.startswith(_PICKLE):
            return read_pickle(data, _PLAIN_DATA)
        return decode_json(data.decode("utf-8", "replace"), max_bytes=MAX_BYTES)
    except (CkptctlError, NotJson) as error:
        raise NotADump(f"{name}: not a readable dump of the flight recorder ({error})") from error


def _members(config: Mapping[object, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, group in config.items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str):
            ranks = [int(each) for each in re.findall(r"\d{1,7}", ranks[: 8 * _MAX_RANKS])]
        if isinstance(ranks, list) and ranks:
            yield str(name), tuple(rank for rank in ranks if isinstance(rank, int))


def _call(entry: object) -> Call | None:
    if not isinstance(entry, dict):
        return None
    group = entry.get("process_group")
    name, description = group if isinstance(group, (list, tuple)) and len(group) == 2 else ("", "")
    operation = str(entry.get("profiling_name", "")).rpartition(":")[2]
    pair = _PAIR.search(operation)
    is_p2p = bool(entry.get("is_p2p")) and pair is not None
    sequence = entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")
    if not isinstance(sequence, int):
        return None
    inputs, outputs = entry.get("input_sizes"), entry.get("output_sizes")
    types = [*_list(entry.get("input_dtypes")), *_list(entry.get("output_dtypes"))]
    return Call(
        group=str(name),
        description=str(description),
        operation=operation,
        sequence=sequence,
        done=entry.get("state") == "completed" or entry.get("retired") is True,
        inputs=_shapes(inputs),
        outputs=_shapes(outputs),
        types=", ".join(dict.fromkeys(map(str, types))),
        n_in=_n_elements(inputs),
        n_out=_n_elements(outputs),
        frame=_frame(entry.get("frames")),
        pair=_sender_first(pair) if is_p2p and pair else None,
    )


def _sender_first(pair: re.Match[str]) -> tuple[int, int]:
    first, second = int(pair[1]), int(pair[3])
    return (first, second) if pair[2] == "->" else (second, first)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _shapes(sizes: object) -> str:
    return ", ".join("x".join(map(str, _list(each))) or "scalar" for each in _list(sizes)[:8])


def _n_elements(sizes: object) -> int:
    total = 0
    for each in _list(sizes):
        n = 1
        for size in _list(each)[:16]:
            n *= size if isinstance(size, int) else 0
        total += n
    return total


def _frame(frames: object) -> str | None:
    for frame in _list(frames):
        if not isinstance(frame, dict):
            continue
        file = str(frame.get("filename", ""))
        if file and not _OWN_FRAMES.search(file):
            return f"{file}:{frame.get('line')} in {frame.get('name')}"
    return None
