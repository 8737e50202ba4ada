"""Which field of a row does the name of a metric mean?

Every trainer has names of its own for the same dozen things. Names are compared
without case, spaces and punctuation, so `train/CE loss` and `train_ce_loss` are one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from ckptctl.errors import UsageError
from ckptctl.loss.formats.clocks import parse_clock
from ckptctl.loss.numbers import Precision, at_least_digits, parse_number
from ckptctl.loss.rows import Number, Place, Row

NUMBERS = ("loss", "lr", "grad_norm", "tokens", "samples", "throughput", "step_time_s", "mfu")
"""The fields of a row that are numbers as printed."""

FIELDS = ("step", *NUMBERS, "at", "interval", "samples_digest")
"""What a pattern's named group, or a key map, can stand for."""

# Where a record has several, the one that stands first counts.
_NAMES = {
    "step": """step globalstep iteration iter trainerglobalstep trainstep numupdates
        globalstepmaxsteps currentsteps currentstep steps batch _step timebatch
        trainingstep optimizerstep optimstep gradientstep niter itr updates update numsteps
        globaliter trainiter""",
    "loss": """lmloss reducedtrainloss lossmetricsglobalavgloss trainceloss
        traincrossentropyloss losstraintotal trainlosstraintotal loss trainlossstep trainloss
        losstrain traininnerloss trainingloss totalloss crossentropyloss celoss
        trainsamplestrainloss losstotal lossestotal totallosstrain avgloss lossavg averageloss
        meanloss lossmean losscurrent crossentropy nll nllloss ce trainlossepoch""",
    "lr": """lr learningrate trainlr trainlearningrate optimlrgroup0 optimlr optimlearningrategroup0
        lrgroup0 lradamw lradam lrdecoupledadamwgroup0 trainlrdecoupledadamwgroup0
        traininnerlr trainsampleslr""",
    "grad_norm": """gradnorm gradientnorm gnorm traingradnorm optimtotalgradnorm
        l2normgradglobal trainl2normgradglobal totalgradnorm traininnergnorm""",
    "tokens": """consumedtokens totaltokens tokens tokensseen numtokens numinputtokensseen
        trainnuminputtokensseen throughputtotaltokens timetoken traintimetoken
        traintokens ntokensseen metricstokens""",
    "samples": "consumedsamples samples samplesseen numsamples timesample traintimesample",
    "throughput": """tokenspersec tokenspersecond toks tps wps tokenssdevice
        throughputdevicetps throughputtokenspersec trainthroughputtokenspersec
        throughputmetricstps tokenspersecondpergpu throughputtps
        samplespersec samplespersecond sps samplessec throughputsamplespersec
        trainthroughputsamplespersec""",
    "step_time_s": """steptime steptimes itertimes iterationtime timeperiteration secperstep
        seconds time itertime""",
    "step_time_ms": """elapsedtimeperiterationms timeperiterationms steptimems itertimems ms
        dtms""",
    "mfu": "mfu throughputdevicemfu trainmfu perfmfu throughputmfu",
    "at": "at timestamp _timestamp walltime createdat ts datetime",
    "samples_digest": "samplesdigest",
}
_WORTH = {
    name: (field, rank)
    for field, names in _NAMES.items()
    for rank, name in enumerate(names.split())
}

# The last record of a Hugging Face trainer sums the run up; its loss is no step's.
_SUMMARY = frozenset({"totalflos", "trainsamplespersecond"})
_SUMMED_UP = "summed up"

# So many names of one log are remembered.
_MAX_NAMES = 10_000

# No program prints a learning rate with fewer, unless it leaves out zeros.
_LR_DIGITS = 3

# A clock in seconds of this century is no step time.
_EPOCH_S = 1e8

# A name that is not in the table may be one with the name of its folder before it.
_FOLDERS = re.compile(r"^(?:(?:metrics?|data|scalars?|stats|logs?|values?|train(?:ing|er)?)[/.])+")
_VALUE_OF = re.compile(r"[/.]values?$")

_PUNCTUATION = re.compile(r"[^0-9a-z_]|(?<=.)_")


def plain_name(name: str) -> str:
    """The name without case, spaces and punctuation; a leading `_` stays."""
    return _PUNCTUATION.sub("", name.lower())


def check_keys(keys: Mapping[str, str]) -> Mapping[str, str]:
    """The key map, from a field to its name in the log; raises `UsageError` for no such field."""
    for field, name in keys.items():
        if field not in FIELDS:
            raise UsageError(
                f"--key {field}={name}: a row has no {field}; it has {', '.join(FIELDS)}"
            )
    return keys


def _within(name: str) -> str:
    """The plain name of a metric without the folders that loggers put around it."""
    return plain_name(_VALUE_OF.sub("", _FOLDERS.sub("", name.lower())))


class RowMaker:
    """Makes rows of the names and texts that one log has.

    `keys` says by which names of its own the log calls a field, and wins over the
    table. `trimmed` says that the log leaves out trailing zeros: a learning rate of
    `0.0001` is then one that somebody set, and not one that is known to a single digit.
    """

    def __init__(self, keys: Mapping[str, str] | None = None, *, trimmed: bool = False) -> None:
        self._trimmed = trimmed
        self._own = {plain_name(name): (field, -1) for field, name in (keys or {}).items()}
        self._precision = {name: Precision() for name in NUMBERS}
        self._known: dict[str, tuple[str, int] | None] = {}

    @property
    def own(self) -> bool:
        """Whether the log has names of its own."""
        return bool(self._own)

    def knows(self, name: str) -> bool:
        """Whether a metric of this name fills a field of a row."""
        return self.field(name) is not None

    def field(self, name: str) -> str | None:
        """The field that a metric of this name fills."""
        worth = self._worth(name)
        return None if worth is None else worth[0]

    def _worth(self, name: str) -> tuple[str, int] | None:
        """The field, and how good a name for it this one is: the least is taken."""
        try:
            return self._known[name]
        except KeyError:
            pass
        plain = plain_name(name)
        worth = self._own.get(plain) or _WORTH.get(plain) or _WORTH.get(_within(name))
        if plain in _SUMMARY:
            worth = (_SUMMED_UP, 0)
        if len(self._known) < _MAX_NAMES:
            self._known[name] = worth
        return worth

    def row(
        self,
        pairs: Iterable[tuple[str, str]],
        place: Place,
        *,
        step: int | None = None,
        at: float | None = None,
    ) -> Row | None:
        """The row that a record's names and texts come to; None where it names no step."""
        best: dict[str, tuple[int, str, str]] = {}
        for name, text in pairs:
            worth = self._worth(name)
            if worth is None:
                continue
            field, rank = worth
            if field not in best or rank < best[field][0]:
                best[field] = (rank, text, name)
        if _SUMMED_UP in best and ("loss" not in best or plain_name(best["loss"][2]) != "loss"):
            return None
        if step is None:
            if "step" not in best:
                return None
            step = parse_step(best["step"][1])
            if step is None:
                return None
        values = self._values({field: text for field, (_, text, _) in best.items()})
        clock = parse_clock(best["at"][1]) if "at" in best else None
        interval = best.get("interval")
        digest = best.get("samples_digest")
        return Row(
            step=step,
            place=place,
            at=clock if clock is not None else at,
            interval=parse_step(interval[1]) if interval else None,
            samples_digest=digest[1] if digest else None,
            **values,
        )

    def _values(self, texts: Mapping[str, str]) -> dict[str, Number | None]:
        values: dict[str, Number | None] = {}
        for field, column in self._precision.items():
            number = parse_number(texts[field]) if field in texts else None
            if number is None:
                continue
            if field == "lr" and self._trimmed:
                number = at_least_digits(number, _LR_DIGITS)
            values[field] = column.refine(number)
        if values.get("step_time_s") is None and "step_time_ms" in texts:
            values["step_time_s"] = _scaled(parse_number(texts["step_time_ms"]), 0.001)
        elif (seconds := values.get("step_time_s")) is not None and seconds.value > _EPOCH_S:
            values["step_time_s"] = None
        if "mfu" in values:
            values["mfu"] = _fraction(values["mfu"], texts["mfu"])
        return values


def parse_step(text: str) -> int | None:
    """A step as printed: `1,200`, `0001200`, `1200.0`, `1200/5000`; None where it is none."""
    try:
        return int(text)
    except ValueError:
        number = parse_number(text.partition("/")[0])
    if number is None or not math.isfinite(number.value) or number.value != int(number.value):
        return None
    return int(number.value)


def _scaled(number: Number | None, factor: float) -> Number | None:
    return None if number is None else Number(number.value * factor, number.quantum * factor)


def _fraction(mfu: Number | None, text: str) -> Number | None:
    # nanoGPT prints -100 % as long as it does not know; above 1 it can only be per cent.
    if mfu is not None and mfu.value > 1 and "%" not in text:
        mfu = _scaled(mfu, 0.01)
    return mfu if mfu is not None and 0 <= mfu.value <= 1 else None
