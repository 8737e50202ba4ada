"""The nodes and devices named by evidence against hardware.

A node's name may end up in a command that drains the node, and a log is untrusted: text
that is not a host name is never used as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptctl.failures.evidence import Evidence
from ckptctl.failures.results import Suspect

_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_HOST_LIST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\[([0-9,-]+)\]")
_MAX_TEXT = 1000
_MOST_NODES = 64


def suspects_in(evidence: Iterable[Evidence]) -> tuple[Suspect, ...]:
    """One suspect per node, in the order of the evidence; one more without a node."""
    found: dict[str | None, tuple[dict[str, None], dict[int, None]]] = {}
    for each in evidence:
        for node in host_names(each.host or "") or (None,):
            devices, ranks = found.setdefault(node, ({}, {}))
            if each.device:
                devices[each.device] = None
            ranks |= dict.fromkeys(each.ranks)
            if each.rank is not None:
                ranks[each.rank] = None
    return tuple(
        Suspect(node, tuple(devices), tuple(ranks))
        for node, (devices, ranks) in found.items()
        # The same device may be named with and without its node.
        if node is not None or len(found) == 1 or devices.keys() - _devices_elsewhere(found)
    )


def _devices_elsewhere(
    found: dict[str | None, tuple[dict[str, None], dict[int, None]]],
) -> set[str]:
    return {each for node, (devices, _) in found.items() if node is not None for each in devices}


def host_names(text: str) -> tuple[str, ...]:
    """The host names in a SLURM host list (`node[017-018,020],gpu1`); () for anything else."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text[:_MAX_TEXT]):
        names += [part] if _HOST_NAME.fullmatch(part) else _expanded(part)
        if len(names) > _MOST_NODES:
            return ()
    return tuple(dict.fromkeys(names))


def _expanded(part: str) -> Iterator[str]:
    listed = _HOST_LIST.fullmatch(part)
    if listed is None:
        return
    for piece in listed[2].split(","):
        first, _, last = piece.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and len(last) <= 9):
            continue
        numbers = range(int(first), min(int(last), int(first) + _MOST_NODES) + 1)
        yield from (f"{listed[1]}{number:0{len(first)}d}" for number in numbers)
