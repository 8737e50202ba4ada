"""Estimate what a failure costs and how often a run should save.

Numbers that the caller does not give are those that attempts recorded, or are measured under the
root, and each is reported with its origin. The formulas stand first; their times are in seconds.
The best interval, of Young and Daly, is the time of training between two saves.

Sources: J. W. Young, 1974; J. T. Daly, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import TYPE_CHECKING, Unpack

from ckptctl.errors import OptionError, UsageError
from ckptctl.formats.frameworks.layouts import compile_pattern, is_own
from ckptctl.formatting import DAY_S, command_line, duration
from ckptctl.inspection.open_step import list_step
from ckptctl.model import ExitCode, Fraction, Message, NextCommand, NonNegative
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.roots import list_root
from ckptctl.selection.watching import pauses_s
from ckptctl.storage.opening import open_store

if TYPE_CHECKING:
    from ckptctl.goodput.history import RunHistory


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

    `source` is `given`, `measured` (file times of the newest steps), or `recorded` by the attempts.
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


def measured(
    root: str, storage: StorageOptions = StorageOptions(), pattern: str | None = None
) -> Measured:
    """Measurements of the steps under a root.

    Raises `StorageError`, and `UsageError` for a path that is no root.
    Cost: one listing, and one for each of at most `MOST_STEPS` steps.
    """
    written_s: dict[int, float] = {}
    saves_s: list[float] = []
    sizes: list[int] = []
    with open_store(root, storage) as store:
        listing = list_root(store, compile_pattern(pattern))
        check_has_steps(store, listing)
        for step in listing.steps[:MOST_STEPS]:
            # Files that ckptctl writes into a step later are not part of the save.
            files = [file for file in list_step(store, step.name) if not is_own(file.path)]
            times = [file.mtime_s for file in files if file.mtime_s is not None]
            if times:
                written_s[step.number] = max(times)
                saves_s.append(max(times) - min(times))
                sizes.append(sum(file.size for file in files))
    if not saves_s:
        return Measured(0)
    n_bytes = round(median(sizes))
    between_s = pauses_s(written_s)
    interval_s = median(between_s) if between_s else None
    if len(saves_s) > 1 and (interval_s is None or interval_s < 1):
        return Measured(len(saves_s), n_bytes=n_bytes)
    return Measured(len(saves_s), interval_s, median(saves_s), n_bytes)


def recovery_cost(
    root: str | None = None,
    *,
    interval_s: float | None = None,
    save_s: float | None = None,
    mtbf_s: float | None = None,
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
    `mtbf_s` is the mean time between failures.

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
    }
    _check(times, root)
    seen, past = Measured(0), None
    if root is not None:
        (storage,) = options_from(keywords, storage)
        from ckptctl.goodput.history import run_history

        seen = measured(root, storage, pattern)
        past = run_history(root, storage=storage)
    of = {} if past is None else _recorded(past)
    lost = of.pop("lost", None)
    for name, seconds in (("interval", seen.interval_s), ("save", seen.save_s)):
        if seconds and name not in of:
            of[name] = Given(name, seconds, "s", "measured")
    for option, value in times.items():
        name = option.removesuffix("-time")
        if value is not None:
            of[name] = Given(name, value, "s", "given")
    numbers = {name: of[name].value if name in of else None for name in _NUMBERS}
    interval_s, save_s, mtbf_s = numbers["interval"], numbers["save"], numbers["mtbf"]
    startup_s = sum(numbers[name] or 0.0 for name in _STARTING)
    rollback_s = None if interval_s is None else interval_s / 2
    given = [of[name] for name in _NUMBERS if name in of]
    if lost is not None and times["interval"] is None:
        rollback_s = lost.value
        given.append(lost)
    if seen.n_bytes is not None:
        given.append(Given("step", seen.n_bytes, "B", "measured"))
    per_failure_s = None if rollback_s is None else rollback_s + startup_s
    daly_s = best_share = None
    if mtbf_s is not None and save_s:
        daly_s = daly_interval(save_s, mtbf_s)
        best_share = effective_share(daly_s, save_s, mtbf_s, startup_s)
    shares: list[float | None] = [None, None, None]
    if mtbf_s is not None and interval_s is not None and save_s is not None:
        # The interval counts from save to save; the rest of it is training.
        training_s = max(0.0, interval_s - save_s)
        shares = [
            None if seconds is None else effective_share(training_s, save_s, seconds, startup_s)
            for seconds in (mtbf_s, of["mtbf"].low, of["mtbf"].high)
        ]
    message = "how often this run saves is unknown: its steps are less than a second apart"
    message += ", perhaps the times of a copy"
    if seen.n_steps < 2:
        message = "fewer than two saves: how often this run saves cannot be measured yet"
    if per_failure_s is not None:
        message = f"a failure costs {_duration(per_failure_s)} on average"
        if daly_s is not None and interval_s is not None and mtbf_s is not None:
            message += f", {DAY_S / mtbf_s:.3g} times a day; best save every {_duration(daly_s)}"
            message += f" (now {_duration(interval_s)})"
    return RecoveryCost(
        given=tuple(given),
        rollback_s=rollback_s,
        startup_s=startup_s,
        per_failure_s=per_failure_s,
        daly_s=daly_s,
        share=shares[0],
        share_low=shares[1],
        share_high=shares[2],
        best_share=best_share,
        message=message,
        exit_code=0,
        next_command=_next(root, interval_s, save_s, mtbf_s),
        cadence=cadence_of(interval_s, save_s, mtbf_s),
        goodput=None if past is None else past.goodput.goodput,
        unknown=tuple(name for name in _STARTING if numbers[name] is None),
    )


_STARTING = ("reschedule", "connect", "load", "compile")
_NUMBERS = ("interval", "save", "mtbf", *_STARTING)
"""The times that an answer rests on, in the order in which it lists them."""


def _recorded(past: RunHistory) -> dict[str, Given]:
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
"""The bounds of what is given, in seconds."""


def _check(times: Mapping[str, float | None], root: str | None) -> None:
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
    if root is None and times["interval"] is None:
        raise UsageError(
            "the interval between saves is unknown: give the root of a run, or --interval",
            next_command="ckptctl cost ROOT --mtbf TIME",
        )


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
