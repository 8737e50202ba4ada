"""Map the names of metrics to the fields of a row, and parse their values.

Names are compared without case, spaces and punctuation, so `train/CE loss` and
`train_ce_loss` are one name. Numbers are parsed in every notation that a training log
uses, together with the precision to which they were printed. Times without a zone are
taken as UTC: only differences between rows of one log are used.
"""

from __future__ import annotations

import calendar
import math
import re
import sys
from collections.abc import Iterable, Mapping
from copy import copy
from functools import lru_cache
from typing import TypeVar

from ckptctl.errors import UsageError
from ckptctl.loss.rows import LogPosition, Number, Row
from ckptctl.outside_numbers import MOST, clamped, finite, whole, whole_of

NUMBERS = (
    "loss",
    "lr",
    "grad_norm",
    "ema_loss",
    "tokens",
    "samples",
    "throughput",
    "device_throughput",
    "step_time_s",
    "mfu",
)
"""The fields of a row that are numbers as printed."""

FIELDS = ("step", *NUMBERS, "at", "interval", "samples_digest", "attempt")
"""The names of the fields, for the groups of a pattern and for a key map."""

# Where a record has several names of a field, the first one in this table counts.
_NAMES = {
    "step": """step globalstep iteration iter trainerglobalstep trainstep numupdates
        globalstepmaxsteps currentsteps currentstep steps batch _step timebatch
        trainingstep optimizerstep optimstep gradientstep niter itr updates update numsteps
        globaliter trainiter it metadatastep metadatastepnum stepnum totaltimesteps
        timetotaltimesteps metadatasamplescount metadataepochnum""",
    "loss": """lmloss reducedtrainloss lossmetricsglobalavgloss trainceloss
        traincrossentropyloss losstraintotal trainlosstraintotal loss trainlossstep trainloss
        losstrain traininnerloss trainingloss totalloss crossentropyloss celoss
        trainsamplestrainloss totloss losstotal lossestotal totallosstrain lastloss avgloss lossavg
        averageloss meanloss lossmean losscurrent steploss pgloss policyloss crossentropy
        nll nllloss ctcloss ce lossestotalloss lossesloss trainlossepoch ltotal lgtotal lpix lgpix
        trainboxloss losslossmean lossglossmean""",
    "step_k": "progresskimgmean",
    "lr": """lr learningrate trainlr trainlearningrate optimlrgroup0 optimlr optimlearningrategroup0
        lrgroup0 lradamw lradam lrdecoupledadamwgroup0 trainlrdecoupledadamwgroup0
        traininnerlr trainsampleslr currentlr currentlearningrate""",
    "grad_norm": """gradnorm gradientnorm gnorm traingradnorm optimtotalgradnorm
        l2normgradglobal trainl2normgradglobal totalgradnorm traininnergnorm""",
    "ema_loss": """emaevalloss evalemaloss evallossema emavalloss valemaloss vallossema
        emavalidationloss validationlossema""",
    # Not TRL's `num_tokens`, which counts from the start of the process.
    "tokens": """consumedtokens totaltokens tokens tokensseen numinputtokensseen
        trainnuminputtokensseen throughputtotaltokens timetoken traintimetoken
        traintokens ntokensseen metricstokens""",
    "samples": "consumedsamples samples samplesseen numsamples timesample traintimesample",
    "throughput": """tokenspersec tokenspersecond toks tps wps throughputtokenspersec
        trainthroughputtokenspersec throughputtps samplespersec samplespersecond sps samplessec
        throughputsamplespersec trainthroughputsamplespersec""",
    "device_throughput": """tokenspersecpergpu tokenspersecondpergpu tokenssdevice
        throughputdevicetps throughputmetricstps throughputpergputflopsgpu tflopsdevice""",
    "step_time_s": """steptime steptimes itertimes iterationtime timeperiteration secperstep
        seconds time itertime elapsed elapsedtime elapsedseconds elapseds""",
    "step_time_ms": """elapsedtimeperiterationms timeperiterationms steptimems itertimems ms
        dtms""",
    "mfu": "mfu throughputdevicemfu trainmfu perfmfu throughputmfu",
    "at": "at timestamp _timestamp walltime createdat ts datetime date",
    "samples_digest": "samplesdigest",
    "attempt": """attempt attemptid run runid restart restarts restartcount jobid slurmjobid
        processid pid""",
}
_FIELD_AND_RANK = {
    name: (field, rank)
    for field, names in _NAMES.items()
    for rank, name in enumerate(names.split())
}

# What these counters count; all others count training steps.
_OTHER_COUNTS = {
    "metadataepochnum": "epochs",
    "metadatasamplescount": "samples",
    "totaltimesteps": "steps of the environment",
    "timetotaltimesteps": "steps of the environment",
    "progresskimgmean": "images",
}

# The last record of a Hugging Face trainer summarises the run; its loss is not of a step.
_SUMMARY = frozenset({"totalflos", "trainsamplespersecond"})
_SUMMARY_FIELD = "summary"

# Its event files and W&B name that loss `train_loss`, and those of steps `loss`.
_OF_STEPS, _OF_RUN = "loss", "trainloss"

# Lightning logs the mean of the epoch at the step of its last batch, beside the loss of that.
_OF_EPOCH = "trainlossepoch"

# The most names of one log that are cached.
_MAX_NAMES = 10_000

# Programs print a learning rate with at least so many digits, unless they leave out zeros.
_LR_DIGITS = 3

# A larger value is a time since the epoch, not a step time.
_EPOCH_S = 1e8

# A name that is not in the table may be a known one with a folder before it.
_FOLDERS = re.compile(
    r"^(?:(?:metrics?|data|scalars?|stats|logs?|values?|train(?:ing|er)?|actor|policy)[/.])+"
)
_VALUE_OF = re.compile(r"[/.]values?$")

_DIVERGING = frozenset({"loss", "lr", "grad_norm"})
"""The fields whose NaN or infinity is evidence; in any other it is no value."""

_T = TypeVar("_T")

_PUNCTUATION = re.compile(r"[^0-9a-z_]|(?<=.)_")


def plain_name(name: str) -> str:
    """The name without case, spaces and punctuation; a leading `_` is kept."""
    return _PUNCTUATION.sub("", name.lower())


def check_keys(keys: Mapping[str, str]) -> Mapping[str, str]:
    """The key map, from a field to its name in the log; raises `UsageError` for unknown fields."""
    for field, name in keys.items():
        if field not in FIELDS:
            raise UsageError(
                f"--key {field}={name}: unknown field {field}; the fields are {', '.join(FIELDS)}"
            )
    return keys


def with_ignored(keys: Mapping[str, str], ignored: Iterable[str]) -> dict[str, str]:
    """The key map, in which names that are ignored are those of fields that no row has."""
    return {**keys, **{f"ignored {name}": name for name in ignored}}


def _within(name: str) -> str:
    """The plain name of a metric without the folders that loggers add."""
    return plain_name(_VALUE_OF.sub("", _FOLDERS.sub("", name.lower())))


class RowMaker:
    """Makes rows from the names and texts in one log.

    `keys` maps a field to the name that the log has for it, and outweighs the table.
    `trimmed` means that the log leaves out trailing zeros: a learning rate of `0.0001` is
    then a configured value, not a value rounded to one digit.
    """

    def __init__(self, keys: Mapping[str, str] | None = None, *, trimmed: bool = False) -> None:
        self._trimmed = trimmed
        self._own = {plain_name(name): (field, -1) for field, name in (keys or {}).items()}
        self.precision = {name: Precision() for name in NUMBERS}
        self._known: dict[str, tuple[str, int] | None] = {}
        self._has_losses_of_steps = False
        self._has_loss = False

    @property
    def own(self) -> bool:
        """Whether the caller mapped any names."""
        return bool(self._own)

    def knows(self, name: str) -> bool:
        """Whether a metric with this name is a field of a row."""
        return self.field(name) is not None

    def field(self, name: str) -> str | None:
        """The field of a metric with this name; None where it is not one."""
        found = self._field_and_rank(name)
        return None if found is None else found[0]

    def _field_and_rank(self, name: str) -> tuple[str, int] | None:
        """The field and the rank of this name for it; the lowest rank is taken."""
        try:
            return self._known[name]
        except KeyError:
            pass
        plain = plain_name(name)
        found = (
            self._own.get(plain) or _FIELD_AND_RANK.get(plain) or _FIELD_AND_RANK.get(_within(name))
        )
        if plain in _SUMMARY:
            found = (_SUMMARY_FIELD, 0)
        if len(self._known) < _MAX_NAMES:
            self._known[name] = found
        return found

    def best(self, pairs: Iterable[tuple[str, _T]]) -> dict[str, tuple[int, _T, str]]:
        """The rank, the value and the name that count for each field."""
        best: dict[str, tuple[int, _T, str]] = {}
        for name, value in pairs:
            found = self._field_and_rank(name)
            if found is None:
                continue
            field, rank = found
            if field not in best or rank < best[field][0]:
                best[field] = (rank, value, name)
        return best

    def snapshot(self) -> RowMaker:
        """A maker with the present precision of each field."""
        made = copy(self)
        made.precision = {name: copy(column) for name, column in self.precision.items()}
        return made

    def row(
        self,
        pairs: Iterable[tuple[str, str]],
        position: LogPosition,
        *,
        step: int | None = None,
        at: float | None = None,
        counts: str | None = None,
    ) -> Row | None:
        """The row with the values of a record; None where it has no step.

        `counts` is what the step counts, if no training steps.
        """
        best = self.best(pairs)
        if _SUMMARY_FIELD in best and ("loss" not in best or plain_name(best["loss"][2]) != "loss"):
            return None
        if "loss" in best:
            name = _within(best["loss"][2])
            self._has_loss = self._has_loss or name == _OF_STEPS
            if name == _OF_RUN and self._has_loss:
                del best["loss"]
        if "loss" in best:
            if plain_name(best["loss"][2]) != _OF_EPOCH:
                self._has_losses_of_steps = True
            elif self._has_losses_of_steps:
                del best["loss"]
        if step is None:
            step = self._step(best)
            if step is None:
                return None
            name = plain_name(best["step" if "step" in best else "step_k"][2])
            counts = counts or _OTHER_COUNTS.get(name)
        values = self._values({field: text for field, (_, text, _) in best.items()})
        clock = parse_clock(best["at"][1]) if "at" in best else None
        if clock is None and "step_time_s" in best:
            clock = _clock_among_durations(best["step_time_s"][1])
        interval = best.get("interval")
        digest = best.get("samples_digest")
        attempt = best.get("attempt")
        return Row(
            step=step,
            position=position,
            at=clock if clock is not None else at,
            interval=parse_step(interval[1]) if interval else None,
            samples_digest=digest[1] if digest else None,
            attempt=attempt[1] if attempt else None,
            counts=counts,
            **values,
        )

    def _step(self, best: Mapping[str, tuple[int, str, str]]) -> int | None:
        if "step" in best:
            return parse_step(best["step"][1])
        # StyleGAN and EDM count thousands of images.
        thousands = parse_number(best["step_k"][1]) if "step_k" in best else None
        is_number = thousands is not None and math.isfinite(thousands.value)
        steps = round(1000 * thousands.value) if thousands is not None and is_number else None
        return steps if steps is not None and abs(steps) <= MOST else None

    def _values(self, texts: Mapping[str, str]) -> dict[str, Number | None]:
        values: dict[str, Number | None] = {}
        for field, column in self.precision.items():
            number = parse_number(texts[field]) if field in texts else None
            if number is None or (field not in _DIVERGING and not math.isfinite(number.value)):
                continue
            if field == "lr" and self._trimmed:
                number = at_least_digits(number, _LR_DIGITS)
            values[field] = column.refine(number)
        if values.get("step_time_s") is None and "step_time_ms" in texts:
            number = parse_number(texts["step_time_ms"])
            if number is not None and math.isfinite(number.value):
                values["step_time_s"] = _scaled(number, 0.001)
        elif (seconds := values.get("step_time_s")) is not None and seconds.value > _EPOCH_S:
            values["step_time_s"] = None
        if "mfu" in values:
            values["mfu"] = _fraction(values["mfu"], texts["mfu"])
        return values


def _clock_among_durations(text: str) -> float | None:
    """The time in a field such as `time`, which holds a duration in other logs."""
    value = finite(text)
    if value is None:
        return clock_in(text)
    return parse_clock(text) if value > _EPOCH_S else None


def parse_step(text: str) -> int | None:
    """A step as printed: `1,200`, `0001200`, `1200.0`, `1200/5000`; None for anything else."""
    step = whole(text, least=-MOST)
    if step is not None:
        return step
    number = parse_number(text.partition("/")[0])
    return None if number is None else whole_of(number.value)


def _scaled(number: Number, factor: float) -> Number:
    return Number(number.value * factor, number.quantum * factor)


def _fraction(mfu: Number | None, text: str) -> Number | None:
    # nanoGPT prints -100 % while it is unknown. A value above 1 is in percent.
    if mfu is not None and mfu.value > 1 and "%" not in text:
        mfu = _scaled(mfu, 0.01)
    return mfu if mfu is not None and 0 <= mfu.value <= 1 else None


_CLOCK = re.compile(
    r"(?:(?:(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)"
    r"|(?P<month_us>\d\d)/(?P<day_us>\d\d)/(?P<year_us>\d{4}))[ T]"
    # At the beginning of a line, a time of the day.
    r"|^[\[(]?)(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[-+]\d\d:?\d\d(?!\d))?"
)

# Times from 1989 to 2103; a larger number is in milliseconds.
_SECONDS = (6e8, 4.2e9)


def clock_in(text: str) -> float | None:
    """The first date with a time in a line, in seconds since the epoch; None without one."""
    match = _CLOCK.search(text)
    if match is None:
        return None
    has_date = match["year"] or match["year_us"]
    midnight = (
        0
        if not has_date
        else _midnight(
            clamped(match["year"] or match["year_us"]),
            clamped(match["month"] or match["month_us"]),
            clamped(match["day"] or match["day_us"]),
        )
    )
    if midnight is None:
        return None
    fraction = finite(f"0.{match['fraction']}") or 0.0 if match["fraction"] else 0.0
    hour, minute, second = (clamped(match[part]) for part in ("hour", "minute", "second"))
    time = hour * 3600 + minute * 60 + second
    return midnight + time + fraction - _offset_s(match["zone"])


def clock_span(text: str) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where the first date with a time is, and its seconds; None without one."""
    match = _CLOCK.search(text)
    return None if match is None else (match.span(), match.span("second"))


def parse_clock(text: str) -> float | None:
    """The time in a field of a record: a number, or a date with a time."""
    value = finite(text)
    if value is None:
        return clock_in(text)
    if _SECONDS[0] <= value / 1000 <= _SECONDS[1]:
        return value / 1000
    return value


def _offset_s(zone: str | None) -> int:
    if not zone or zone == "Z":
        return 0
    digits = zone[1:].replace(":", "")
    seconds = clamped(digits[:2]) * 3600 + clamped(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


@lru_cache(maxsize=64)
def _midnight(year: int, month: int, day: int) -> int | None:
    if not (1 <= year <= 9999 and 1 <= month <= 12 and 1 <= day <= 31):
        return None
    return calendar.timegm((year, month, day, 0, 0, 0))


_NUMBER = re.compile(
    r"(?P<digits>[-+]?(?:\d[\d,_]*(?:\.\d*)?|\.\d+))(?:[eE](?P<power>[-+]?\d{1,4}))?"
    r"\s?(?P<suffix>[KkMGTPB])?(?P<unit>%|ms|s|sec)?"
)
_MAX_NUMBER = 400
"""Characters of a longer text, which is no number."""
# As printed by Python, C, Java, JSON libraries and the old Windows runtime.
_NAN = re.compile(r"[-+]?(?:nan(?:\([^)]*\))?|1\.#(?:QNAN|SNAN|IND)0*|1\.\$)", re.IGNORECASE)
_INFINITY = re.compile(r"(?P<sign>[-+]?)(?:inf(?:inity)?|1\.#INF0*|∞)", re.IGNORECASE)

_SUFFIXES = {"K": 3, "k": 3, "M": 6, "G": 9, "B": 9, "T": 12, "P": 15}
_UNITS = {"%": -2, "ms": -3}

# More digits than this are a whole float.
_WHOLE_DIGITS = 15


def parse_number(text: str) -> Number | None:
    """The number in `text`, in base units: `1.2K` is 1200, `50%` 0.5, `30ms` 0.03.

    None where `text` is not a number. NaN and infinity have quantum 0.
    """
    # The fast path: Python can parse nine of ten texts.
    value = finite(text)
    if value is None:
        return _parse_notation(text.strip().strip("'\""))
    mantissa, _, power = text.replace("E", "e").partition("e")
    return Number(value, _unit(mantissa.replace("_", "").strip(), _power(power)))


def _parse_notation(text: str) -> Number | None:
    if len(text) > _MAX_NUMBER:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return _not_finite(text)
    digits = match["digits"].replace(",", "").replace("_", "")
    power = _power(match["power"]) + _SUFFIXES.get(match["suffix"], 0)
    power += _UNITS.get(match["unit"], 0)
    value = finite(f"{digits}e{power}")
    if value is None:  # more than the largest float, as `1e999`
        return Number(-math.inf if digits.startswith("-") else math.inf, 0.0)
    return Number(value, _unit(digits, power))


def _power(text: str | None) -> int:
    """The exponent of a number as printed; an absurd one as the largest that a float can have."""
    power = whole(text, least=-MOST) if text else 0
    limit = sys.float_info.max_10_exp
    return (-limit if text and text.startswith("-") else limit) if power is None else power


def _unit(digits: str, power: int) -> float:
    """The value of one unit of the last digit; 0 for a whole float."""
    if len(digits) > _WHOLE_DIGITS and _significant(digits) > _WHOLE_DIGITS:
        return 0.0
    dot = digits.find(".")
    return power_of_ten(power if dot < 0 else power - (len(digits) - dot - 1))


@lru_cache(maxsize=1024)
def power_of_ten(power: int) -> float:
    """The float nearest to this power of ten; always finite."""
    # A zero may be written with any exponent: the unit of `0e400` exceeds the largest float.
    return float(f"1e{min(power, sys.float_info.max_10_exp)}")


def _not_finite(text: str) -> Number | None:
    if _NAN.fullmatch(text):
        return Number(math.nan, 0.0)
    infinity = _INFINITY.fullmatch(text)
    if infinity:
        return Number(-math.inf if infinity["sign"] == "-" else math.inf, 0.0)
    return None


def _significant(digits: str) -> int:
    return len(digits.lstrip("+-0.").replace(".", ""))


class Precision:
    """The precision of one column of a log that may leave out trailing zeros.

    `2.5` among numbers with four decimals was printed as precisely as they were. The most
    decimals and the most significant digits so far are kept, and the coarser of the two
    is the precision: `round(x, 4)` fixes the former, `%.4g` the latter.
    """

    __slots__ = ("decimals", "digits", "whole")

    def __init__(self) -> None:
        self.decimals = -400
        self.digits = 0
        self.whole = False

    def refine(self, number: Number) -> Number:
        """The number with the precision of its column; whole floats keep quantum 0."""
        if self.whole or number.quantum == 0:
            self.whole = self.whole or math.isfinite(number.value)
            return Number(number.value, 0.0)
        decimals = _decimals_of(number.quantum)
        self.decimals = max(self.decimals, decimals)
        power = -self.decimals
        if number.value:
            magnitude = math.floor(math.log10(abs(number.value)))
            self.digits = max(self.digits, magnitude + decimals + 1)
            power = max(power, magnitude - self.digits + 1)
        if power >= -decimals:
            return number
        return Number(number.value, power_of_ten(power))


@lru_cache(maxsize=1024)
def _decimals_of(quantum: float) -> int:
    return -round(math.log10(quantum))


def at_least_digits(number: Number, digits: int) -> Number:
    """The number with at least so many significant digits, where it has only one."""
    if not number.value or not number.quantum:
        return number
    magnitude = math.floor(math.log10(abs(number.value)))
    if round(number.value / number.quantum) >= 10:
        return number
    return Number(number.value, power_of_ten(magnitude - digits + 1))
