"""Report which samples of a run were trained once, repeated or skipped, by its data ledger.

The newest usable step holds the totals of its own branch: a resume continues the ledger of the
step that it resumes from, so what an abandoned branch trained is in no total. The digest of an
epoch proves that each of its samples was trained once. Where it does not, the ids that were kept,
or the order of a `GlobalLoader`, give exact counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from ckptctl.errors import StorageError
from ckptctl.formats.own.data_ledger import (
    MODULUS,
    DataFields,
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

if TYPE_CHECKING:
    from typing_extensions import Unpack

FIRST_IDS = 10
"""Ids that a report names."""
MOST_SEARCHED = 2_000_000
"""Samples of an epoch in which single ones are searched for."""
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


@dataclass(frozen=True, slots=True)
class ExpectedEpoch:
    """What each epoch has to contain: `total` is None for ids from 0 on."""

    count: int
    total: int | None = None
    order: Order | None = None


@dataclass(slots=True)
class _Total:
    count: int = 0
    total: int = 0
    ids: list[SampleId] | None = None
    is_whole: bool = False
    spans: Sequence[SpanFields] | None = None


@dataclass(slots=True)
class Account:
    """What a ledger holds: the totals of each epoch since a step."""

    step: int
    since: int
    expected: ExpectedEpoch | None
    epochs: dict[int, _Total]
    n_unrecorded: int = 0


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
        account = account_of(fields, samples)
        flight = _in_flight(opened.store, account.step) if which.endswith("@auto") else None
        return _answer(opened.url, account, flight, root)


# What a ledger holds


def account_of(fields: DataFields, samples: int | None = None) -> Account:
    """What the ledger of a step holds; `samples` is the size of the data set where it has none."""
    stated = fields["expected"]
    expected = None if samples is None else ExpectedEpoch(samples)
    if stated is not None:
        order = stated["order"]
        expected = ExpectedEpoch(
            stated["count"],
            None if stated["sum"] is None else int(stated["sum"], 16),
            None
            if order is None
            else Order(stated["count"], order["seed"], shuffle=order["shuffle"]),
        )
    unrecorded = fields["unrecorded"]
    return Account(
        step=fields["step"],
        since=fields["since"],
        expected=expected,
        epochs={
            one["epoch"]: _Total(
                one["count"], int(one["sum"], 16), one["ids"], one["is_whole"], one["spans"]
            )
            for one in fields["epochs"]
        },
        n_unrecorded=0 if unrecorded is None else unrecorded["count"],
    )


def _in_flight(store: Store, step: int) -> int | None:
    """How far the newest attempt reports to have trained beyond the step; None without a report."""
    with suppress(StorageError):
        for _, lines in read_attempts(store, last=1, events=("progress", "saving")):
            steps = [getattr(line, "step", None) for line in lines]
            return max((one - step for one in steps if one is not None and one > step), default=0)
    return None


# What became of each epoch


def epochs_of(account: Account) -> Iterator[EpochUse]:
    """What became of the samples of each epoch, the first epoch first."""
    expected_total = _expected_total(account.expected)
    newest = max(account.epochs, default=0)
    oldest = min(account.epochs, default=0)
    for epoch, own in sorted(account.epochs.items()):
        yield _Epoch(
            account,
            epoch,
            own,
            expected_total,
            has_ended=epoch < newest,
            is_partial=account.since > 0 and epoch == oldest,
        ).use()


def _expected_total(expected: ExpectedEpoch | None) -> int:
    if expected is None or expected.count > MOST_SAMPLES:
        return 0
    return sum_of_indices(expected.count) if expected.total is None else expected.total


@dataclass(slots=True)
class _Epoch:
    """One epoch, and what is known of it."""

    account: Account
    epoch: int
    own: _Total
    expected_total: int
    has_ended: bool
    is_partial: bool

    def use(self) -> EpochUse:
        own, expected = self.own, self.account.expected
        if expected is None:
            return self._counted_alone()
        n = expected.count
        if n > MOST_SAMPLES:
            return self._unknown(
                f"the digest of more than {MOST_SAMPLES:,} samples is not computed",
                "a ledger of a part of the data set",
            )
        if (own.count, own.total) == (n, self.expected_total):
            return self._made(EpochState.ONCE, once=n, repeated=0, skipped=0, to_come=0)
        if self.is_partial:
            return self._unknown(
                f"the ledger began after step {self.account.since:,}, maybe within the epoch",
                "an epoch that begins and ends in the ledger",
            )
        if self.account.n_unrecorded:
            return self._unknown(
                f"{counted(self.account.n_unrecorded, 'step')} recorded no samples",
                "a call of DataLedger.add in each step, on every data-parallel rank",
            )
        if expected.order is not None and own.spans and own.count:
            found = self._by_order(expected.order, own.spans)
            if found is not None:
                return found
        if own.ids is not None:
            return self._by_ids(own.ids, n)
        return self._by_digest(n)

    def _made(self, state: EpochState, **facts: object) -> EpochUse:
        expected = self.account.expected
        n_samples = None if expected is None else expected.count
        facts = {"n_samples": n_samples, "trained": self.own.count, **facts}
        return EpochUse(epoch=self.epoch, state=state, **facts)  # type: ignore[arg-type]

    def _unknown(self, why: str, would_show: str, **facts: object) -> EpochUse:
        return self._made(EpochState.UNKNOWN, why=why, would_show=would_show, **facts)

    def _counted_alone(self) -> EpochUse:
        """What the ids show where the data set is not known."""
        would_show = "the size of the data set: --samples N, or DataLedger(samples=...)"
        if self.own.ids is None:
            return self._unknown(
                "the samples that an epoch has to contain are not known", would_show
            )
        seen = Counter(self.own.ids)
        again = [one for one, n in seen.items() if n > 1]
        facts = {"once": len(seen) - len(again), "repeated": len(again)}
        if not again:
            return self._unknown(
                "the samples that an epoch has to contain are not known", would_show, **facts
            )
        return self._made(
            EpochState.WRONG,
            **facts,
            least_repeated=self.own.count - len(seen),
            first_repeated=_first(again),
            why="skipped samples are not known, because those of the data set are not",
            would_show=would_show,
        )

    def _by_ids(self, ids: Sequence[SampleId], n: int) -> EpochUse:
        """What the ids show that were kept."""
        seen = Counter(ids)
        if self.own.is_whole:  # each sample of the data set once, besides them
            again = list(seen)
            n_seen = n
        else:
            again = [one for one, times in seen.items() if times > 1]
            n_seen = len(seen)
        facts: dict[str, object] = {
            "once": n_seen - len(again),
            "repeated": len(again),
            "least_repeated": self.own.count - n_seen,
            "first_repeated": _first(again),
        }
        are_indices = self.account.expected is not None and self.account.expected.total is None
        n_left = n - n_seen
        strange = _strange(seen, n) if are_indices else ()
        if strange or n_left < 0 or (not n_left and not self._has_all(seen)):
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
            facts |= {"first_skipped": _missing(seen, n) if n_left else ()}
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

    def _has_all(self, seen: Collection[SampleId]) -> bool:
        """Whether ids, as many as there are in the data set, are its ids."""
        return self.own.is_whole or sum_of(tuple(seen)) == self.expected_total

    def _by_digest(self, n: int) -> EpochUse:
        """What count and digest show without ids."""
        own = self.own
        if own.count < n and not self.has_ended:
            return self._unknown(
                "the epoch has not ended, and neither an order nor ids show its samples",
                "the end of the epoch, or DataLedger(keep_ids=True)",
                to_come=None,
            )
        again, missing = self._few_samples(n) or (None, None)
        if again is not None and missing is not None:
            return self._made(
                EpochState.WRONG,
                once=n - len(set(again)) - len(missing),
                repeated=len(set(again)),
                skipped=len(missing),
                to_come=0,
                least_repeated=len(again),
                least_skipped=len(missing),
                first_repeated=_first(sorted(set(again))),
                first_skipped=_first(missing),
            )
        return self._made(
            EpochState.WRONG,
            to_come=0,
            least_repeated=max(own.count - n, int(own.count == n)),
            least_skipped=max(n - own.count, int(own.count == n)),
            why="a digest shows that samples were repeated or skipped, not how many",
            would_show="DataLedger(keep_ids=True)",
        )

    def _few_samples(self, n: int) -> tuple[list[int], list[int]] | None:
        """The repeated and the skipped ids, if they are two at most and ids are indices."""
        expected, surplus = self.account.expected, self.own.count - n
        if expected is None or expected.total is not None or n > MOST_SEARCHED or abs(surplus) > 2:
            return None
        difference = (self.own.total - self.expected_total) % MODULUS
        hashes = {sum_of((one,)): one for one in range(n)}
        if abs(surplus) == 1:
            one = hashes.get(difference if surplus > 0 else -difference % MODULUS)
            found = None if one is None else [one]
            return None if found is None else (found, []) if surplus > 0 else ([], found)
        for value, one in hashes.items():
            if surplus == 0:  # the hash of the repeated one, minus that of the skipped one
                other = hashes.get((value - difference) % MODULUS)
                if other is not None:
                    return [one], [other]
                continue
            other = hashes.get(((difference if surplus > 0 else -difference) - value) % MODULUS)
            if other is not None and (other != one or surplus > 0):
                pair = sorted((one, other))
                return (pair, []) if surplus > 0 else ([], pair)
        return None

    def _by_order(self, order: Order, spans: Sequence[SpanFields]) -> EpochUse | None:
        """What the order shows at the positions that were trained; None if the digest is another.

        Cost: some microseconds for each sample.
        """
        n, first = order.n_samples, self.epoch * order.n_samples
        n_trained = sum(span["count"] for span in spans)
        if n_trained != self.own.count or max(n, n_trained) > MOST_ORDERED:
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
        if sum_of(trained) != self.own.total:
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


def _strange(seen: Collection[SampleId], n: int) -> list[SampleId]:
    return [one for one in seen if not isinstance(one, int) or not 0 <= one < n]


def _missing(seen: Collection[SampleId], n: int) -> tuple[SampleId, ...]:
    found: list[SampleId] = []
    for one in range(n):
        if len(found) == FIRST_IDS:
            break
        if one not in seen:
            found.append(one)
    return tuple(found)


# The answer


def _answer(source: str, account: Account, in_flight: int | None, root: str) -> DataUse:
    epochs = tuple(epochs_of(account))
    verdict = _verdict(epochs)
    return DataUse(
        source=source,
        step=account.step,
        since=account.since,
        verdict=verdict,
        epochs=epochs,
        unrecorded_steps=account.n_unrecorded,
        in_flight_steps=in_flight,
        message=_message(verdict, epochs, account),
        exit_code={"found": 30, "excluded": 0, "unknown": 31}[verdict],
        next_command=command_line("history", root.rpartition("@")[0] or root)
        if verdict == "found"
        else None,
    )


def _verdict(epochs: Sequence[EpochUse]) -> Verdict:
    states = {one.state for one in epochs}
    if EpochState.WRONG in states:
        return "found"
    if EpochState.UNKNOWN in states or not states:
        return "unknown"
    return "excluded"


def _message(verdict: Verdict, epochs: Sequence[EpochUse], account: Account) -> str:
    upto = f"up to step {account.step:,}"
    if verdict == "excluded":
        return f"every sample was trained once {upto}"
    if verdict == "unknown":
        unknown = [one for one in epochs if one.state is EpochState.UNKNOWN]
        why = unknown[0].why if unknown else "no samples are recorded"
        where = f"epoch {unknown[0].epoch}: " if unknown else ""
        return f"not known whether samples were repeated or skipped {upto}: {where}{why}"
    wrong = [one for one in epochs if one.state is EpochState.WRONG]
    return f"epoch {wrong[0].epoch}: {'; '.join(faults_of(wrong[0]))}" + (
        f"; and {counted(len(wrong) - 1, 'more epoch')}" if len(wrong) > 1 else ""
    )


def faults_of(epoch: EpochUse) -> Iterator[str]:
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
