"""Read what a root records about its attempts: their ledgers, and the state of `ckptctl run`.

Either alone is enough, and each is data from outside: lines that are damaged are left out,
values of another type count as not recorded. An attempt in both is one record: the ledger
names the attempt of `run` that it belongs to; without that name, the time decides.
"""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

from ckptctl.data_classes import replace
from ckptctl.errors import OwnFileUnreadable, PathNotFound
from ckptctl.failures.slow_ranks import SlowRank
from ckptctl.formats.own.supervision import AttemptDocument, SlowRankDocument, SupervisorDocument
from ckptctl.goodput.timeline import Record
from ckptctl.selection.history import Row, read_attempts
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name
from ckptctl.supervisor.state import STATE_FOLDER, Revisions

MAX_ATTEMPTS = 5_000
"""Ledgers of a root that are read; the newest."""

FRESH_S = 600.0
"""An attempt without an end whose last line is younger runs: a step has that limit as well."""

_JUMP_S = 5.0
"""A clock that differs by more from one that nobody sets has jumped."""

_MOST_S = 1e10
_LARGEST = 1 << 62


class _Ledger(NamedTuple):
    """The record that one ledger alone gives, and the attempt of `run` that it names."""

    record: Record
    supervised: str
    jumped_s: float


_States = Sequence[SupervisorDocument]


def read_records(store: Store, state: Store | None, now_s: float) -> tuple[list[Record], list[str]]:
    """The attempts of a root in order, and warnings about what could not be read.

    `state` is where `ckptctl run --state` kept its state, None for the root itself. Cost: three
    listings, one read per attempt and one per state. Raises `StorageError`.
    """
    warnings: list[str] = []
    states = [*_states(state or store, "" if state else STATE_FOLDER, warnings)]
    ledgers = [
        ledger
        for _, rows in read_attempts(store, last=MAX_ATTEMPTS)
        if (ledger := _ledger(rows, now_s)) is not None
    ]
    jumps = [ledger.jumped_s for ledger in ledgers if abs(ledger.jumped_s) > _JUMP_S]
    if jumps:
        warnings.append(
            f"the clock jumped during {len(jumps)} of {len(ledgers)} attempts, by up to "
            f"{max(map(abs, jumps)):.0f} s; times between attempts may be wrong by that"
        )
    return _merged(states, ledgers, now_s), warnings


def _states(store: Store, folder: str, warnings: list[str]) -> Iterator[SupervisorDocument]:
    """The newest state that can be read, and those of phases."""
    try:
        entries = store.list_dir(folder)
    except PathNotFound:
        return
    phases = [base_name(each.path) for each in entries if each.kind == "dir"]
    for name in ("", *phases):
        where = "/".join(part for part in (folder, name) if part)
        try:
            found = Revisions(store, where, of_root=False).newest()
        except OwnFileUnreadable as error:
            warnings.append(error.message)
            continue
        if found is not None:
            yield found


# One ledger


def _ledger(rows: Sequence[Row], now_s: float) -> _Ledger | None:
    """What the lines of rank 0 say; None where no line has a time."""
    own = [row for row in rows if row.get("rank", 0) == 0 and _moment(row) is not None]
    if not own:
        return None
    is_timed = all(_number(row, "process_s") is not None for row in own)
    first_at = _moment(own[0]) or 0.0
    aged = [(_age(row, first_at, is_timed), row) for row in own]
    aged.sort(key=lambda each: each[0])
    (first_age, first), (last_age, last) = aged[0], aged[-1]
    first_at, last_at = _moment(first) or 0.0, _moment(last) or 0.0
    of: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for age, row in aged:
        of[str(row.get("event"))].append((age, row))
    resumed_age, resumed = of["resumed"][0] if of["resumed"] else (math.nan, None)
    load_s = None if resumed is None else _number(resumed, "load_s")
    cluster = _object(of["started"][0][1], "cluster") if of["started"] else {}
    saves = [step for _, row in of["saved"] if (step := _step(row)) is not None]
    begins = [age for age, _ in of["saving"] if age > resumed_age]
    how = str(of["ended"][-1][1].get("how")) if of["ended"] else None
    points = () if resumed is None else tuple(_points(aged, resumed_age, resumed, is_timed))
    begun = [row for age, row in aged if age > resumed_age and _is_point(row, is_timed)]
    record = Record(
        began_s=first_at - first_age,
        ran_s=last_age,
        ended_s=last_at,
        running=how is None and now_s - last_at < FRESH_S,
        done=how is not None and how != "exception" and not of["failed"],
        resumed=resumed is not None,
        resumed_from=None if resumed is None else _step(resumed),
        startup_s=None if load_s is None else max(0.0, resumed_age - load_s),
        load_s=load_s,
        stalled_s=max(
            (value for row in own if (value := _number(row, "stalled_s")) is not None),
            default=None,
        ),
        points=points,
        has_first_step=bool(begun) and begun[0].get("event") == "progress",
        saved=max(saves, default=None),
        n_saves=len(saves),
        interval_s=(begins[-1] - resumed_age) / len(begins) if begins else None,
        job=_text(cluster, "job"),
        requeued=bool(_number(cluster, "requeues")),
        world_size=_step(of["started"][0][1], "world_size") if of["started"] else None,
        allocation=_text(cluster, "node_list") or _text(cluster, "node") or "",
        cause=next(
            (cause for _, row in of["failed"] if (cause := _text(row, "evidence", "reason"))), None
        ),
    )
    supervised = _text(of["started"][0][1], "supervised") if of["started"] else None
    return _Ledger(record, supervised or "", (last_at - first_at) - (last_age - first_age))


def _age(row: Row, first_at: float, is_timed: bool) -> float:
    """The age of the process at a line; that since the first line where none is recorded."""
    if is_timed:
        return _number(row, "process_s") or 0.0
    return max(0.0, (_moment(row) or 0.0) - first_at)


def _is_point(row: Row, is_timed: bool) -> bool:
    # A line about a save that is done has the time of its end, which a save in the background
    # reaches later than the step. Older ledgers have no line about its begin.
    if row.get("event") == "ended":
        return row.get("how") != "exception"
    return row.get("event") in ("progress", "saving" if is_timed else "saved")


def _points(
    aged: Sequence[tuple[float, Row]], resumed_age: float, resumed: Row, is_timed: bool
) -> Iterator[tuple[float, int]]:
    """The steps with their training time, rising in both."""
    last_s, last = resumed_age - (_number(resumed, "stalled_s") or 0.0), _step(resumed) or 0
    yield last_s, last
    for age, row in aged:
        trained_s, step = age - (_number(row, "stalled_s") or 0.0), _step(row)
        if step is not None and _is_point(row, is_timed) and trained_s >= last_s and step > last:
            last_s, last = trained_s, step
            yield trained_s, step


def _moment(row: Row) -> float | None:
    at = row.get("at")
    if not isinstance(at, str) or len(at) > 40:
        return None
    with suppress(ValueError, OverflowError):
        seconds = datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
        return seconds if 0 <= seconds < _MOST_S else None
    return None


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < _MOST_S else None


def _step(row: Row, name: str = "step") -> int | None:
    value = row.get(name)
    return value if type(value) is int and 0 <= value < _LARGEST else None


def _text(row: Row, *names: str) -> str | None:
    found = (row.get(name) for name in names)
    return next((each[:200] for each in found if isinstance(each, str) and each), None)


def _object(row: Row, name: str) -> Mapping[str, object]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


# Ledgers and states together


def _merged(states: _States, ledgers: Sequence[_Ledger], now_s: float) -> list[Record]:
    """Every attempt once, in order; clocks that go back do not change the order of a record."""
    attempts = {
        f"{state['run']}/{attempt['number']}": (state, attempt)
        for state in states
        for attempt in state["attempts"]
    }
    spans = [*_spans(attempts)]
    of: dict[str, list[_Ledger]] = defaultdict(list)
    for ledger in ledgers:
        name = ledger.supervised or _by_time(ledger.record, spans)
        of[name if name in attempts else ""].append(ledger)
    sequences = [[ledger.record for ledger in of[""]]]
    for state in states:
        sequences.append([])
        for attempt in state["attempts"]:
            own = [each.record for each in of[f"{state['run']}/{attempt['number']}"]]
            sequences[-1] += _supervised(attempt, own, now_s, held=state["owner"] is not None)
    keyed: list[tuple[float, Record]] = []
    for sequence in sequences:
        keyed += zip(accumulate((each.began_s for each in sequence), max), sequence, strict=True)
    return [record for _, record in sorted(keyed, key=lambda each: each[0])]


def _slow(document: SlowRankDocument) -> SlowRank:
    relative, individual = document["relative_percent"], document["individual_percent"]
    return SlowRank(
        document["rank"],
        document["node"][:200],
        None if relative is None else min(1.0, relative / 100),
        None if individual is None else min(1.0, individual / 100),
        "heartbeats",
    )


_Attempts = Mapping[str, tuple[SupervisorDocument, AttemptDocument]]


_Span = tuple[float, float, str]


def _spans(attempts: _Attempts) -> Iterator[_Span]:
    """The attempts of `run` with when they began and ended; one without an end may still run."""
    for name, (_, attempt) in attempts.items():
        began_s = _moment({"at": attempt["started_at"]})
        if began_s is not None:
            ran_s = attempt["milliseconds"] / 1000
            runs = attempt["decision"] is None and not ran_s
            # Older states have the time of the start to the second.
            yield began_s - 1, math.inf if runs else began_s + ran_s, name


def _by_time(record: Record, spans: Sequence[_Span]) -> str:
    """The attempt during which a ledger was begun that names none; empty for none."""
    found = (name for began_s, ended_s, name in spans if began_s <= record.began_s <= ended_s)
    return next(found, "")


def _supervised(
    attempt: AttemptDocument, ledgers: Sequence[Record], now_s: float, *, held: bool
) -> Iterator[Record]:
    """The records of one attempt of `run`: more than one where the launcher restarted the ranks."""
    last = ledgers[-1] if ledgers else None
    start_s = _moment({"at": attempt["started_at"]})
    began_s = start_s if start_s is not None else last.began_s if last else now_s
    runs = attempt["decision"] is None and held and (last is None or last.running)
    ran_s = attempt["milliseconds"] / 1000
    if not ran_s and last is not None:
        ran_s = max(0.0, last.began_s - began_s) + last.ran_s
    elif not ran_s and runs:
        ran_s = max(0.0, now_s - began_s)
    about = {
        "number": attempt["number"],
        "running": runs,
        "done": attempt["decision"] == "done"
        or (attempt["decision"] == "stopped" and last is not None and last.done),
        "exit_code": attempt["exit_code"],
        "decision": attempt["decision"],
        "nodes": tuple(attempt["nodes"]),
        "ranks": tuple(attempt["ranks"]),
        "slow": tuple(_slow(each) for each in attempt.get("slow", ())),
    }
    if last is None:
        yield Record(
            began_s=began_s,
            ran_s=ran_s,
            ended_s=began_s + ran_s,
            cause=attempt["cause"],
            saved=attempt["step"],
            world_size=attempt["world_size"],
            allocation=attempt["allocation"] or attempt["host"],
            **about,  # type: ignore[arg-type]
        )
        return
    for place, record in enumerate(ledgers):
        head_s = max(0.0, record.began_s - began_s)
        if place == 0 and head_s <= ran_s:
            # The launcher began before the processes: what it took is part of their startup.
            startup_s = None if record.startup_s is None else record.startup_s + head_s
            own_s = head_s + record.ran_s
            record = replace(record, began_s=began_s, ran_s=own_s, startup_s=startup_s)
            head_s = 0.0
        if place < len(ledgers) - 1:
            yield replace(record, running=False, done=False)
            continue
        whole_s = ran_s - head_s if attempt["milliseconds"] else record.ran_s
        yield replace(
            record,
            ran_s=max(0.0, whole_s),
            ended_s=record.ended_s + max(0.0, whole_s - record.ran_s),
            cause=attempt["cause"] or record.cause,
            world_size=attempt["world_size"] or record.world_size,
            allocation=attempt["allocation"] or record.allocation,
            **about,  # type: ignore[arg-type]
        )
