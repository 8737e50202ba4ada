"""Report which samples of a run were trained once, repeated or skipped, by its data ledger.

The newest usable step holds the totals of its own branch: a resume continues the ledger of the
step that it resumes from, so what an abandoned branch trained is in no total. The digest of an
epoch proves that each of its samples was trained once. Where it does not, the ids that were kept,
or the order of a `GlobalLoader`, give exact counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Literal, Unpack

from ckptctl.errors import StorageError
from ckptctl.formats.own.data_ledger import (
    DataFields,
    EpochFields,
    SampleId,
    SpanFields,
    sum_of,
    sum_of_indices,
)
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.model import ExitCode, Message, NextCommand
from ckptctl.options import Requirements, StepKeywords, StorageOptions, options_from
from ckptctl.selection.history import read_attempts
from ckptctl.selection.targets import parse_target
from ckptctl.selection.verifying import open_target
from ckptctl.storage.contract import Store
from ckptctl.train.samples import Order

FIRST_IDS = 10
"""Ids that a report names."""
MOST_ORDERED = 20_000_000
"""Samples of an epoch, and trained in it, whose order is computed: a minute."""
MOST_SAMPLES = 1_000_000_000
"""Samples of a data set whose digest is computed: some minutes."""

Verdict = Literal["found", "excluded", "unknown"]


class EpochState(StrEnum):
    """What is known of the samples of an epoch."""

    ONCE = "once"
    """Each sample of the epoch was trained once."""
    ONCE_SO_FAR = "once-so-far"
    """The epoch has not ended, and no sample was repeated or skipped so far."""
    WRONG = "repeated-or-skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochUse:
    """The samples of one epoch."""

    epoch: int
    """Its number, as the loader or the script counts."""
    state: EpochState
    """What is known of its samples."""
    n_samples: int | None
    """Samples of the data set; null where that is not known."""
    trained: int
    """Samples that were trained, each as often as it was."""
    once: int | None = None
    """Samples that were trained once; null where that is not known."""
    repeated: int | None = None
    """Samples that were trained more than once."""
    skipped: int | None = None
    """Samples that were not trained although the run went on behind them."""
    to_come: int | None = None
    """Samples that a run which continues has still to train."""
    least_repeated: int = 0
    """How often samples were trained again, at least."""
    least_skipped: int = 0
    """Samples that were skipped, at least."""
    first_repeated: tuple[SampleId, ...] = ()
    """The first ids of those that were repeated."""
    first_skipped: tuple[SampleId, ...] = ()
    """The first ids of those that were skipped."""
    after_step: int | None = None
    """The step after which samples were repeated or skipped first; null where that is unknown."""
    why: str | None = None
    """Why it is not known, or not in numbers."""
    would_show: str | None = None
    """What would show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUse:
    """Which samples a run has trained, over all attempts of its branch."""

    source: str
    """The step."""
    step: int | None
    """The last step that the ledger contains; null without a ledger."""
    since: int | None
    """The ledger contains the steps after this one."""
    verdict: Verdict
    """Repeated or skipped samples are found, are excluded up to `step`, or unknown."""
    epochs: tuple[EpochUse, ...]
    """Every epoch of the ledger, the first one first."""
    unrecorded_steps: int
    """Steps for which no samples were recorded."""
    in_flight_steps: int | None
    """Steps that an attempt trained after the newest step, whose samples are in no ledger; null
    where that is not recorded."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand


def data_use(
    root: str,
    *,
    samples: int | None = None,
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StepKeywords],
) -> DataUse:
    """Which samples of each epoch were trained once, repeated or skipped.

    Reads the ledger in the step that `pick` would choose, or in a given one (`ROOT@1200`).
    `samples` is the size of the data set, whose ids are the numbers from 0 on, where the ledger
    does not hold it.

    Raises `NothingToResume` if the root holds no usable step, `UsageError` and `StorageError`.

    Cost: that of `pick`, and one read; a quarter of a second for a million samples of the data
    set, and some more for one that is not right.
    """
    requirements, storage = options_from(keywords, requirements, storage)
    which = f"{root}@auto" if parse_target(root).which is None else root
    with open_target(which, requirements, storage) as opened:
        fields, why = opened.read_data_ledger()
        if fields is None:
            return _no_ledger(opened.url, why)
        flight = _in_flight(opened.store, fields["step"]) if which.endswith("@auto") else None
        epochs = tuple(epochs_of(fields, samples))
        wrong = [epoch for epoch in epochs if epoch.state is EpochState.WRONG]
        unknown = [epoch for epoch in epochs if epoch.state is EpochState.UNKNOWN]
        upto = f"up to step {fields['step']:,}"
        verdict: Verdict = "excluded"
        exit_code, next_command = 0, None
        message = f"every sample was trained once {upto}"
        if wrong:
            verdict, exit_code = "found", 30
            next_command = command_line("history", root.rpartition("@")[0] or root)
            message = f"epoch {wrong[0].epoch}: {'; '.join(_faults_of(wrong[0]))}"
            if len(wrong) > 1:
                message += f"; and {counted(len(wrong) - 1, 'more epoch')}"
        elif unknown or not epochs:
            verdict, exit_code = "unknown", 31
            message = f"not known whether samples were repeated or skipped {upto}: "
            first = unknown[0] if unknown else None
            message += f"epoch {first.epoch}: {first.why}" if first else "no samples are recorded"
        unrecorded = fields["unrecorded"]
        return DataUse(
            source=opened.url,
            step=fields["step"],
            since=fields["since"],
            verdict=verdict,
            epochs=epochs,
            unrecorded_steps=0 if unrecorded is None else unrecorded["count"],
            in_flight_steps=flight,
            message=message,
            exit_code=exit_code,
            next_command=next_command,
        )


def _in_flight(store: Store, step: int) -> int | None:
    """How far the newest attempt reports to have trained beyond the step; None without a report."""
    with suppress(StorageError):
        for _, lines in read_attempts(store, last=1, events=("progress", "saving")):
            steps = [getattr(line, "step", None) for line in lines]
            return max((one - step for one in steps if one is not None and one > step), default=0)
    return None


# What became of each epoch


def epochs_of(fields: DataFields, samples: int | None = None) -> Iterator[EpochUse]:
    """What became of the samples of each epoch by the ledger of a step, the first epoch first.

    `samples` is the size of the data set where the ledger does not hold it.
    """
    stated = fields["expected"]
    n, total, order = samples, None, None
    if stated is not None:
        n, total = stated["count"], None if stated["sum"] is None else int(stated["sum"], 16)
        if (drawn := stated["order"]) is not None:
            order = Order(n, drawn["seed"], shuffle=drawn["shuffle"])
    are_indices = total is None
    if n is not None and n <= MOST_SAMPLES and total is None:
        total = sum_of_indices(n)
    epochs = {epoch["epoch"]: epoch for epoch in fields["epochs"]}
    oldest, newest = min(epochs, default=0), max(epochs, default=0)
    for number, own in sorted(epochs.items()):
        yield _Epoch(
            fields,
            own,
            n,
            total or 0,
            order,
            are_indices=are_indices,
            has_ended=number < newest,
            is_partial=fields["since"] > 0 and number == oldest,
        ).use()


@dataclass(slots=True)
class _Epoch:
    """One epoch of a ledger; `expected_total` is the digest of the `n_samples` of the data set."""

    fields: DataFields
    own: EpochFields
    n_samples: int | None
    expected_total: int
    order: Order | None
    are_indices: bool
    """The ids are the numbers from 0 on."""
    has_ended: bool
    is_partial: bool

    def use(self) -> EpochUse:
        own, n, unrecorded = self.own, self.n_samples, self.fields["unrecorded"]
        if n is None:
            return self._counted_alone()
        if n > MOST_SAMPLES:
            return self._unknown(
                f"the digest of more than {MOST_SAMPLES:,} samples is not computed",
                "a ledger of a part of the data set",
            )
        if (own["count"], int(own["sum"], 16)) == (n, self.expected_total):
            return self._made(EpochState.ONCE, once=n, repeated=0, skipped=0, to_come=0)
        if self.is_partial:
            return self._unknown(
                f"the ledger began after step {self.fields['since']:,}, maybe within the epoch",
                "an epoch that begins and ends in the ledger",
            )
        if unrecorded is not None:
            return self._unknown(
                f"{counted(unrecorded['count'], 'step')} recorded no samples",
                "a call of DataLedger.add in each step, on every data-parallel rank",
            )
        if self.order is not None and own["spans"] and own["count"]:
            found = self._by_order(self.order, own["spans"])
            if found is not None:
                return found
        if own["ids"] is not None:
            return self._by_ids(own["ids"], n)
        return self._by_digest(n)

    def _made(self, state: EpochState, **facts: object) -> EpochUse:
        facts = {"n_samples": self.n_samples, "trained": self.own["count"], **facts}
        return EpochUse(epoch=self.own["epoch"], state=state, **facts)  # type: ignore[arg-type]

    def _unknown(self, why: str, would_show: str, **facts: object) -> EpochUse:
        return self._made(EpochState.UNKNOWN, why=why, would_show=would_show, **facts)

    def _counted_alone(self) -> EpochUse:
        would_show = "the size of the data set: --samples N, or DataLedger(samples=...)"
        seen = Counter(self.own["ids"] or ())
        again = [one for one, n in seen.items() if n > 1]
        facts = {"once": len(seen) - len(again), "repeated": len(again)}
        if not again:
            why = "the samples that an epoch has to contain are not known"
            known = {} if self.own["ids"] is None else facts
            return self._unknown(why, would_show, **known)
        return self._made(
            EpochState.WRONG,
            **facts,
            least_repeated=self.own["count"] - len(seen),
            first_repeated=_first(again),
            why="skipped samples are not known, because those of the data set are not",
            would_show=would_show,
        )

    def _by_ids(self, ids: Sequence[SampleId], n: int) -> EpochUse:
        seen = Counter(ids)
        is_whole, are_indices = self.own["is_whole"], self.are_indices
        if is_whole:  # each sample of the data set once, besides them
            again = list(seen)
            n_seen = n
        else:
            again = [one for one, times in seen.items() if times > 1]
            n_seen = len(seen)
        facts: dict[str, object] = {
            "once": n_seen - len(again),
            "repeated": len(again),
            "least_repeated": self.own["count"] - n_seen,
            "first_repeated": _first(again),
        }
        n_left = n - n_seen
        strange = [
            sample
            for sample in (seen if are_indices else ())
            if not isinstance(sample, int) or not 0 <= sample < n
        ]
        # As many ids as there are in the data set may be others.
        are_all = is_whole or n_left or sum_of(tuple(seen)) == self.expected_total
        if strange or n_left < 0 or not are_all:
            such = f", such as {some_of([str(one) for one in strange[:3]])}" if strange else ""
            return self._unknown(
                f"ids are not of the data set{such}",
                "the ids of the data set: DataLedger(samples=...)",
                **facts,
            )
        if self.has_ended and n_left and not are_indices:
            return self._made(
                EpochState.WRONG,
                **facts,
                least_skipped=n_left,
                to_come=0,
                why="the ids of the data set are not kept, only their digest",
                would_show="numbers from 0 on as ids: DataLedger(samples=N)",
            )
        if self.has_ended:
            facts |= {"skipped": n_left, "least_skipped": n_left, "to_come": 0}
            missing = (index for index in range(n) if index not in seen)
            facts |= {"first_skipped": tuple(islice(missing, FIRST_IDS)) if n_left else ()}
            is_wrong = bool(again or n_left)
            return self._made(EpochState.WRONG if is_wrong else EpochState.ONCE, **facts)
        if again:
            return self._made(
                EpochState.WRONG,
                **facts,
                why="skipped samples are not known before the epoch has ended",
                would_show="the first step of the next epoch that is saved",
            )
        return self._made(EpochState.ONCE_SO_FAR, **facts, skipped=None, to_come=n_left)

    def _by_digest(self, n: int) -> EpochUse:
        count = self.own["count"]
        if count < n and not self.has_ended:
            return self._unknown(
                "the epoch has not ended, and neither an order nor ids show its samples",
                "the end of the epoch, or DataLedger(keep_ids=True)",
                to_come=None,
            )
        return self._made(
            EpochState.WRONG,
            to_come=0,
            least_repeated=max(count - n, int(count == n)),
            least_skipped=max(n - count, int(count == n)),
            why="a digest shows that samples were repeated or skipped, not how many",
            would_show="DataLedger(keep_ids=True)",
        )

    def _by_order(self, order: Order, spans: Sequence[SpanFields]) -> EpochUse | None:
        """What the order shows at the positions that were trained; None if the digest is another.

        Cost: some microseconds for each sample.
        """
        n, first = order.n_samples, self.own["epoch"] * order.n_samples
        n_trained = sum(span["count"] for span in spans)
        if n_trained != self.own["count"] or max(n, n_trained) > MOST_ORDERED:
            return None
        times = [0] * n
        after: int | None = None
        end = 0
        for span in spans:
            if span["start"] != end and after is None:
                after = span["after"]
            end = span["start"] + span["count"]
            if end > n:
                return None
            for place in range(span["start"], end):
                times[place] += 1
        trained = [
            order.sample_at(first + place) for place in range(n) for _ in range(times[place])
        ]
        if sum_of(trained) != int(self.own["sum"], 16):
            return None
        end = n if self.has_ended else max(place + 1 for place in range(n) if times[place])
        again = [place for place in range(n) if times[place] > 1]
        missing = [place for place in range(end) if not times[place]]
        return self._made(
            EpochState.WRONG if again or missing else EpochState.ONCE_SO_FAR,
            once=times.count(1),
            repeated=len(again),
            skipped=len(missing),
            to_come=n - end,
            least_repeated=len(trained) - n + times.count(0),
            least_skipped=len(missing),
            first_repeated=tuple(order.sample_at(first + place) for place in again[:FIRST_IDS]),
            first_skipped=tuple(order.sample_at(first + place) for place in missing[:FIRST_IDS]),
            after_step=after,
        )


def _first(ids: Iterable[SampleId]) -> tuple[SampleId, ...]:
    return tuple(ids)[:FIRST_IDS]


def _faults_of(epoch: EpochUse) -> Iterator[str]:
    """The repeated and the skipped samples of an epoch, each in a few words."""
    of = "" if epoch.n_samples is None else f" of {epoch.n_samples:,}"
    for exact, least, word in (
        (epoch.skipped, epoch.least_skipped, "skipped"),
        (epoch.repeated, epoch.least_repeated, "repeated"),
    ):
        if exact:
            yield f"{exact:,}{of} samples were {word}"
        elif exact is None and least:
            yield f"at least {least:,}{of} samples were {word}"


def _no_ledger(url: str, why: str | None) -> DataUse:
    return DataUse(
        source=url,
        step=None,
        since=None,
        verdict="unknown",
        epochs=(),
        unrecorded_steps=0,
        in_flight_steps=None,
        message=f"not known whether samples were repeated or skipped: {why}; a Checkpointer "
        "with a GlobalLoader or a DataLedger keeps a ledger",
        exit_code=31,
        next_command="ckptctl data --help",
    )
