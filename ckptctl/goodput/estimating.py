"""Estimate what a failure costs and how often a run should save.

Numbers that the caller does not give are those that attempts recorded, or are measured under the
root, and each is reported with its origin. The formulas stand first; their times are in seconds.
The best interval, of Young and Daly, is the time of training between two saves.

Sources: J. W. Young, 1974; J. T. Daly, 2006; Kokolis et al., arXiv 2410.21680.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, median
from typing import TYPE_CHECKING

from ckptctl.errors import OptionError, UsageError
from ckptctl.formats.frameworks.layouts import compile_pattern, is_own
from ckptctl.formatting import DAY_S, command_line, duration
from ckptctl.inspection.open_step import list_step
from ckptctl.model import ExitCode, Fraction, Message, NextCommand, NonNegative
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.roots import list_root
from ckptctl.selection.watching import pauses_s
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptctl.goodput.history import RunHistory


def mtbf_of(n_nodes: int, failures_per_node_day: float) -> float:
    """Mean time between failures of a job on `n_nodes`, in seconds.

    Measured fleets: 0.0065 and 0.00234 failures per node and day (Kokolis et al.). Holds for
    large jobs; small ones failed less often than the formula predicts.
    """
    return DAY_S / (n_nodes * failures_per_node_day)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The best training time between two saves: Young's square root and two more terms.

    It is the mean time between failures where saves are slow.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = save_s / (2 * mtbf_s)
    first_order_s = math.sqrt(2 * save_s * mtbf_s)
    return first_order_s * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def effective_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """The share of all time that is training and not lost: between 0 and 1.

    Exact for independent failures (exponentially distributed), which may also come during a
    save or a restart.
    """
    if not interval_s > 0:
        return 0.0
    between = (interval_s + save_s) / mtbf_s
    try:
        # What is repeated lengthens the time between two saves by this factor; 1 without failures.
        longer = math.exp(restart_s / mtbf_s) * (math.expm1(between) / between if between else 1.0)
    except OverflowError:
        return 0.0
    return min(1.0, interval_s / ((interval_s + save_s) * longer))


class Cadence(StrEnum):
    """The interval between saves, compared with the mean time between failures."""

    SHORT_ENOUGH = "short-enough"
    LONGER_THAN_BEST = "longer-than-best"
    ABOVE_MTBF = "above-mtbf"
    UNKNOWN = "unknown"


def cadence_of(interval_s: float | None, save_s: float | None, mtbf_s: float | None) -> Cadence:
    """Whether the interval is below the mean time between failures, and twice the best one."""
    if interval_s is None or mtbf_s is None:
        return Cadence.UNKNOWN
    if interval_s >= mtbf_s:
        return Cadence.ABOVE_MTBF
    if save_s and interval_s > 2 * daly_interval(save_s, mtbf_s):
        return Cadence.LONGER_THAN_BEST
    return Cadence.SHORT_ENOUGH


@dataclass(frozen=True, slots=True)
class Given:
    """One number that the answer rests on.

    `source` is `given`, `measured` (file times of the newest steps), `recorded` (by the attempts)
    or `worked out`.
    """

    name: str
    """What the value is of."""
    value: NonNegative
    """The value in its unit."""
    unit: str
    """Seconds or bytes."""
    source: str
    """Where the value is from."""
    n: int | None = None
    """How many observations it is the mean of; null where it is no mean."""
    low: NonNegative | None = None
    """Its lower bound at 95 % confidence; null where it has none."""
    high: NonNegative | None = None
    """Its upper bound; null where it has none."""


@dataclass(frozen=True, slots=True)
class RecoveryCost:
    """What one failure costs, and what the saves and failures together leave. Times in seconds."""

    given: tuple[Given, ...]
    """The values that the estimate is based on."""
    rollback_s: NonNegative | None
    """T0: training that is repeated, as it was recorded; else half an interval."""
    startup_s: NonNegative
    """T1 + T2 + T3 + T4, without those that are unknown."""
    per_failure_s: NonNegative | None
    """T0 + T1 + T2 + T3 + T4."""
    daly_s: NonNegative | None
    """Best training time between two saves, by Daly's formula."""
    share: Fraction | None
    """Effective training time ratio at the given interval."""
    best_share: Fraction | None
    """Effective training time ratio at Daly's interval."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    cadence: Cadence = Cadence.UNKNOWN
    """The interval compared with the mean time between failures."""
    share_low: Fraction | None = None
    """`share` at the lower bound of the mean time between failures; null where it was given."""
    share_high: Fraction | None = None
    """`share` at the upper bound."""
    goodput: Fraction | None = None
    """The share of the time so far that was training and is kept; null where not recorded."""
    unknown: tuple[str, ...] = ()
    """The times that were neither given nor recorded; they count as 0."""


MOST_STEPS = 11


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of the newest `n_steps` steps of a run; None where nothing can be measured.

    `interval_s` is from save to save, `save_s` the time from a save's first file to its last: at
    least that long it took. `n_bytes` is the size of a step. Steps less than a second apart carry
    the times of a copy, which measure nothing.
    """

    n_steps: int
    interval_s: float | None = None
    save_s: float | None = None
    n_bytes: int | None = None

    @property
    def why_unknown(self) -> str:
        """Why there is no interval."""
        if self.n_steps < 2:
            return "fewer than two saves: how often this run saves cannot be measured yet"
        return (
            "how often this run saves is unknown: its steps are less than a second apart, perhaps "
            "the times of a copy"
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    number: int
    first_s: float
    last_s: float
    n_bytes: int


def measured(
    root: str, storage: StorageOptions = StorageOptions(), pattern: str | None = None
) -> Measured:
    """Measurements of the steps under a root.

    Raises `StorageError`, and `UsageError` for a path that is no root.
    Cost: two listings, and one for each of at most `MOST_STEPS` steps.
    """
    with open_store(root, storage) as store:
        check_has_steps(store, list_root(store, compile_pattern(pattern)))
        saved = [*_saved(store, pattern)]
    if not saved:
        return Measured(0)
    n_bytes = round(median(save.n_bytes for save in saved))
    between_s = pauses_s({save.number: save.last_s for save in saved})
    interval_s = median(between_s) if between_s else None
    if len(saved) > 1 and (interval_s is None or interval_s < 1):
        return Measured(len(saved), n_bytes=n_bytes)
    save_s = median(save.last_s - save.first_s for save in saved)
    return Measured(len(saved), interval_s, save_s, n_bytes)


def _saved(store: Store, pattern: str | None) -> Iterator[_Saved]:
    for step in list_root(store, compile_pattern(pattern)).steps[:MOST_STEPS]:
        # Files that ckptctl writes into a step later are not part of the save.
        files = [file for file in list_step(store, step.name) if not is_own(file.path)]
        times = [one.mtime_s for one in files if one.mtime_s is not None]
        if times:
            yield _Saved(step.number, min(times), max(times), sum(one.size for one in files))


def recovery_cost(
    root: str | None = None,
    *,
    interval_s: float | None = None,
    save_s: float | None = None,
    mtbf_s: float | None = None,
    n_nodes: int | None = None,
    failures_per_node_day: float | None = None,
    reschedule_s: float | None = None,
    connect_s: float | None = None,
    load_s: float | None = None,
    compile_s: float | None = None,
    pattern: str | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> RecoveryCost:
    """The time that one failure costs, T = T0 + T1 + T2 + T3 + T4, and the best interval.

    T0 is half of `interval_s`; T1 to T4 are what rescheduling, connecting the ranks,
    loading and compiling take. `save_s` is how long training pauses for a save.
    `mtbf_s` is the mean time between failures; else `n_nodes` and
    `failures_per_node_day` give it.

    With a `root`, what is not given is taken from the record of its attempts (`run_history`).
    Failures of the last 24 hours of running count alone where they are significantly more
    frequent than before, for example since a node was lost. The interval, and the time of a
    save that no attempt recorded, are measured by file times: the latter is a lower bound, and
    an upper one where saves are asynchronous.

    Raises `UsageError` where neither a root nor an interval is there, or a number is none;
    `StorageError` where the root does not answer.
    """
    times = {
        "interval": interval_s,
        "save-time": save_s,
        "mtbf": mtbf_s,
        "reschedule": reschedule_s,
        "connect": connect_s,
        "load": load_s,
        "compile": compile_s,
        "failures-per-node-day": failures_per_node_day,
    }
    _check(times, n_nodes, root)
    seen, past = Measured(0), None
    if root is not None:
        (storage,) = options_from(keywords, storage)
        from ckptctl.goodput.history import run_history

        seen = measured(root, storage, pattern)
        past = run_history(root, storage=storage)
    recorded = {} if past is None else _recorded(past)
    given: list[Given] = []
    lost = recorded.get("lost") if interval_s is None else None
    interval_s = _known(given, "interval", interval_s, recorded.get("interval") or seen.interval_s)
    save_s = _known(given, "save", save_s, recorded.get("save") or seen.save_s or None)
    if mtbf_s is None and n_nodes is not None and failures_per_node_day is not None:
        mtbf_s = mtbf_of(n_nodes, failures_per_node_day)
        given.append(Given("mtbf", mtbf_s, "s", "worked out"))
    else:
        mtbf_s = _known(given, "mtbf", mtbf_s, recorded.get("mtbf"))
    starting = [
        (name, _known(given, name, value, recorded.get(name)))
        for name, value in (
            ("reschedule", reschedule_s),
            ("connect", connect_s),
            ("load", load_s),
            ("compile", compile_s),
        )
    ]
    if lost is not None:
        given.append(lost)
    if seen.n_bytes is not None:
        given.append(Given("step", seen.n_bytes, "B", "measured"))
    startup_s = sum(value for _, value in starting if value is not None)
    answer = _answer(root, seen, tuple(given), startup_s)
    return replace(
        answer,
        goodput=None if past is None else past.goodput.goodput,
        unknown=tuple(name for name, value in starting if value is None),
    )


def _recorded(past: RunHistory) -> dict[str, Given]:
    """What attempts recorded, each with the number of observations."""
    found: dict[str, Given] = {}
    for name, part in (
        ("reschedule", "restart_s"),
        ("connect", "startup_s"),
        ("load", "load_s"),
        ("compile", "first_step_s"),
    ):
        values = [each for one in past.attempts if (each := getattr(one, part)) is not None]
        if values:
            mean_s = fmean(values)
            found[name] = Given(name, mean_s, "s", "recorded", len(values))
    spaced = [each for each in past.attempts if each.interval_s is not None and each.n_saves]
    n_saves = sum(each.n_saves for each in spaced)
    if n_saves:
        mean_s = sum((each.interval_s or 0.0) * each.n_saves for each in spaced) / n_saves
        found["interval"] = Given("interval", mean_s, "s", "recorded", n_saves)
    lost = [each.lost_s for each in past.attempts if each.failed and each.lost_s is not None]
    if lost:
        found["lost"] = Given("lost", fmean(lost), "s", "recorded", len(lost))
    saving = [each for each in past.attempts if each.save_s is not None and each.n_saves]
    n_saves = sum(each.n_saves for each in saving)
    if n_saves:
        stalled_s = sum(each.save_s or 0.0 for each in saving)
        found["save"] = Given("save", stalled_s / n_saves, "s", "recorded", n_saves)
    goodput = past.goodput
    whole, recent = goodput.mtbf, goodput.recent
    is_worse = whole.mean_s and recent.high_s is not None and recent.high_s < whole.mean_s
    mtbf = recent if is_worse else whole
    if mtbf.mean_s is not None:
        found["mtbf"] = Given(
            "mtbf", mtbf.mean_s, "s", "recorded", mtbf.failures, mtbf.low_s, mtbf.high_s
        )
    return found


_LEAST, _MOST = 1e-9, 1e12
"""The bounds of what is given: seconds, numbers of nodes, failures a day."""


def _check(times: Mapping[str, float | None], n_nodes: int | None, root: str | None) -> None:
    for name, value in times.items():
        may_be_0 = name in ("reschedule", "connect", "load", "compile", "save-time")
        if value is not None and not (_LEAST <= value <= _MOST or (may_be_0 and value == 0)):
            raise OptionError(
                f"--{name}",
                f"is {value:g}; it must be {'0 or ' if may_be_0 else ''}from {_LEAST:g} "
                f"to {_MOST:g}",
            )
    interval_s, save_s = times["interval"], times["save-time"]
    if interval_s is not None and save_s is not None and save_s >= interval_s:
        raise OptionError(
            "--save-time",
            f"is {_duration(save_s)} and --interval {_duration(interval_s)}: "
            "--save-time must be shorter than --interval; give the time that a save takes from "
            "training",
        )
    if n_nodes is not None and not 1 <= n_nodes <= _MOST:
        raise OptionError("--nodes", f"is {n_nodes}; it must be from 1 to {_MOST:g}")
    if times["mtbf"] is None and (n_nodes is None) != (times["failures-per-node-day"] is None):
        raise OptionError(
            "--nodes",
            "and --failures-per-node-day belong together",
            next_command="ckptctl cost --interval TIME --nodes NODES --failures-per-node-day RATE",
        )
    if root is None and times["interval"] is None:
        raise UsageError(
            "the interval between saves is unknown: give the root of a run, or --interval",
            next_command="ckptctl cost ROOT --mtbf TIME",
        )


def _known(
    given: list[Given], name: str, value: float | None, found: Given | float | None
) -> float | None:
    """The value that is used; its origin is added to `given`."""
    if value is not None:
        given.append(Given(name, value, "s", "given"))
        return value
    if found is None:
        return None
    given.append(found if isinstance(found, Given) else Given(name, found, "s", "measured"))
    return given[-1].value


def _answer(
    root: str | None, seen: Measured, given: tuple[Given, ...], startup_s: float
) -> RecoveryCost:
    of = {each.name: each for each in given}
    interval_s, save_s, mtbf_s = (
        of[name].value if name in of else None for name in ("interval", "save", "mtbf")
    )
    rollback_s = None if interval_s is None else interval_s / 2
    if "lost" in of:
        rollback_s = of["lost"].value
    per_failure_s = None if rollback_s is None else rollback_s + startup_s
    daly_s = best_share = None
    shares: list[float | None] = [None, None, None]
    if mtbf_s is not None and save_s:
        daly_s = daly_interval(save_s, mtbf_s)
        best_share = effective_share(daly_s, save_s, mtbf_s, startup_s)
    if mtbf_s is not None and interval_s is not None and save_s is not None:
        # The interval counts from save to save; the rest of it is training.
        shares = [
            None
            if each is None
            else effective_share(max(0.0, interval_s - save_s), save_s, each, startup_s)
            for each in (mtbf_s, of["mtbf"].low, of["mtbf"].high)
        ]
    return RecoveryCost(
        given=given,
        rollback_s=rollback_s,
        startup_s=startup_s,
        per_failure_s=per_failure_s,
        daly_s=daly_s,
        share=shares[0],
        share_low=shares[1],
        share_high=shares[2],
        best_share=best_share,
        message=(
            seen.why_unknown
            if per_failure_s is None
            else _message(interval_s, per_failure_s, daly_s, mtbf_s)
        ),
        exit_code=0,
        next_command=_next(root, interval_s, save_s, mtbf_s),
        cadence=cadence_of(interval_s, save_s, mtbf_s),
    )


def _message(
    interval_s: float | None, per_failure_s: float, daly_s: float | None, mtbf_s: float | None
) -> str:
    message = f"a failure costs {_duration(per_failure_s)} on average"
    if daly_s is None or interval_s is None or mtbf_s is None:
        return message
    message += f", {DAY_S / mtbf_s:.3g} times a day; best save every {_duration(daly_s)}"
    return message + f" (now {_duration(interval_s)})"


def _next(
    root: str | None, interval_s: float | None, save_s: float | None, mtbf_s: float | None
) -> str | None:
    words = ["cost"] if root is None else ["cost", root]
    if interval_s is None:
        return command_line(*words, "--interval", "TIME", "--mtbf", "TIME")
    if root is None:
        words += ["--interval", f"{interval_s:g}"]
    if mtbf_s is None:
        return command_line(*words, "--mtbf", "TIME")
    return None if save_s else command_line(*words, "--mtbf", f"{mtbf_s:g}", "--save-time", "TIME")


def _duration(seconds: float) -> str:
    return duration(seconds, digits=3)
