"""Map the names of metrics to the fields of a row, and parse their values.

Names are compared without case, spaces and punctuation, so `train/CE loss` and
`train_ce_loss` are one name. Numbers are parsed in every notation that a training log
uses, together with the precision to which they were printed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from ckptctl.logs.clocks import clock_in, in_seconds
from ckptctl.logs.formats import TABLE
from ckptctl.logs.rows import LogPosition, Number, Row
from ckptctl.outside_numbers import MOST, finite, whole, whole_of

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

# Where a record has several names of a field, the first one in the table counts.
_FIELD_AND_RANK = {
    name: (field, rank)
    for field, names in TABLE.fields.items()
    for rank, name in enumerate(names.split())
}

# The last record of a Hugging Face trainer summarises the run; its loss is not of a step.
_SUMMARY = frozenset({"totalflos", "trainsamplespersecond"})
_SUMMARY_FIELD = "summary"

# Its event files and W&B name that loss `train_loss`, and those of steps `loss`.
_STEP_LOSS, _RUN_LOSS, _ANY_LOSS = "loss", "trainloss", "any"

# Lightning logs the mean of the epoch at the step of its last batch, beside the loss of that.
_EPOCH_LOSS = "trainlossepoch"

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
        self._own = {plain_name(name): (field, -1) for field, name in (keys or {}).items()}
        self.has_own_names = bool(keys)
        self._columns = {
            name: Precision(
                _LR_DIGITS if trimmed and name == "lr" else 1, is_fraction=name in _FRACTIONS
            )
            for name in NUMBERS
        }
        self._known: dict[str, tuple[str, int] | None] = {}
        self.used: set[str] = set()
        """The plain names of the key map that the log has."""
        self.seen_losses: set[str] = set()
        """The kinds of losses so far; with another kind, other names may be that of the loss."""

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
        if plain in self._own:
            self.used.add(plain)
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

    def row(
        self,
        pairs: Iterable[tuple[str, str]],
        position: LogPosition,
        *,
        step: int | None = None,
        at: float | None = None,
    ) -> Row | None:
        """The row with the values of a record; None where it has no step."""
        best = self.best(pairs)
        if _SUMMARY_FIELD in best and ("loss" not in best or plain_name(best["loss"][2]) != "loss"):
            return None
        if "loss" in best and self.is_repeated(best["loss"][2]):
            del best["loss"]
        texts = {field: text for field, (_, text, _) in best.items()}
        if step is None and "step" in texts:
            step = parse_step(texts["step"])
        return None if step is None else self.row_of(step, position, texts, at=at)

    def is_repeated(self, name: str) -> bool:
        """Whether a loss of this name is the mean of others in the same log."""
        within = _within(name)
        if within == _STEP_LOSS:
            self.seen_losses.add(_STEP_LOSS)
        if within == _RUN_LOSS and _STEP_LOSS in self.seen_losses:
            return True
        if plain_name(name) == _EPOCH_LOSS:
            return _ANY_LOSS in self.seen_losses
        self.seen_losses.add(_ANY_LOSS)
        return False

    def row_of(
        self, step: int, position: LogPosition, texts: Mapping[str, str], *, at: float | None = None
    ) -> Row:
        """The row of a step with the values in these texts of its fields."""
        values: dict[str, Number] = {}
        columns = self._columns
        for field, text in texts.items():
            if field in columns and (number := columns[field].read(text)) is not None:
                if number.value - number.value != 0.0 and field not in _DIVERGING:
                    continue  # NaN or infinite
                values[field] = number
        mfu = values.pop("mfu", None)
        if mfu is not None and mfu.value > 1 and "%" not in texts["mfu"]:
            mfu = _scaled(mfu, 0.01)  # in percent
        if mfu is not None and 0 <= mfu.value <= 1:  # nanoGPT prints -100 % while it is unknown
            values["mfu"] = mfu
        if "step_time_s" in values:
            if values["step_time_s"].value > _EPOCH_S:
                del values["step_time_s"]
        elif "step_time_ms" in texts:
            number = parse_number(texts["step_time_ms"])
            if number is not None and math.isfinite(number.value):
                values["step_time_s"] = _scaled(number, 0.001)
        clock = parse_clock(texts["at"]) if "at" in texts else None
        if clock is None and "step_time_s" in texts:
            # A field such as `time` holds a duration in one log, and a time in another.
            duration = finite(texts["step_time_s"])
            if duration is None or duration > _EPOCH_S:
                clock = parse_clock(texts["step_time_s"])
        at = at if clock is None else clock
        interval = texts.get("interval")
        value = values.get
        return Row(  # by place: names take three times as long
            step,
            position,
            *(value("loss"), value("lr"), value("grad_norm"), value("ema_loss")),
            *(value("tokens"), value("samples"), value("throughput"), value("device_throughput")),
            *(value("step_time_s"), value("mfu")),
            at,
            parse_step(interval) if interval else None,
            texts.get("samples_digest"),
            texts.get("attempt"),
            "loss" in texts and "loss" not in values and texts["loss"].lower() in _NO_VALUE,
        )


def parse_step(text: str) -> int | None:
    """A step as printed: `1,200`, `0001200`, `1200.0`, `1200/5000`; None for anything else."""
    step = whole(text, least=-MOST)
    if step is not None:
        return step
    number = parse_number(text.partition("/")[0])
    return None if number is None else whole_of(number.value)


def _scaled(number: Number, factor: float) -> Number:
    return Number(number.value * factor, number.quantum * factor)


def parse_clock(text: str) -> float | None:
    """The time in a field of a record: a date with a time, or a number, by any clock."""
    value = finite(text)
    if value is None:
        return clock_in(text)
    at_s = in_seconds(value)
    return value if at_s is None else at_s


_NUMBER = re.compile(
    r"(?P<digits>[-+]?(?:\d[\d,_]*(?:\.\d*)?|\.\d+))(?:[eE](?P<power>[-+]?\d{1,4}))?"
    r"\s?(?P<suffix>[KkMGTPB])?(?P<unit>%|ms|s|sec)?"
)
# `0,0003` and `2,95302` group no thousands: the comma is that of the decimals.
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0{1,20},\d{1,20}|\d{1,20},(?:\d{1,2}|\d{4,20}))")
_ONE_COMMA = re.compile(r"[-+]?\d{1,3},\d{3}")
_FRACTIONS = frozenset({"loss", "lr", "grad_norm", "ema_loss"})
"""Numbers of which `2,953` is no count of thousands."""
_MAX_NUMBER = 400
"""Characters of a longer text, which is no number."""
# As printed by Python, C, Java, JSON libraries and the old Windows runtime.
_NAN = re.compile(r"[-+]?(?:nan(?:\([^)]*\))?|1\.#(?:QNAN|SNAN|IND)0*|1\.\$)", re.IGNORECASE)
_INFINITY = re.compile(r"(?P<sign>[-+]?)(?:inf(?:inity)?|1\.#INF0*|∞)", re.IGNORECASE)

_NO_VALUE = frozenset({"none", "null", "nil", "na", "n/a", "<na>"})
"""What is printed where a metric has no value."""

_SUFFIXES = {"K": 3, "k": 3, "M": 6, "G": 9, "B": 9, "T": 12, "P": 15}
_UNITS = {"%": -2, "ms": -3}

# More digits than this are a whole float.
_WHOLE_DIGITS = 15


def parse_number(text: str, *, is_fraction: bool = False) -> Number | None:
    """The number in `text`, in base units: `1.2K` is 1200, `50%` 0.5, `30ms` 0.03.

    `1,234` is 1234, except where `is_fraction`.

    None where `text` is not a number. NaN and infinity have quantum 0.
    """
    # The fast path: Python can parse nine of ten texts.
    value = finite(text)
    if value is None:
        return _parse_notation(text.strip().strip("'\""), is_fraction=is_fraction)
    mantissa, _, power = text.replace("E", "e").partition("e")
    return Number(value, _unit(mantissa.replace("_", "").strip(), _power(power)))


def _parse_notation(text: str, *, is_fraction: bool) -> Number | None:
    if len(text) > _MAX_NUMBER:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return _not_finite(text)
    digits = match["digits"]
    if _DECIMAL_COMMA.fullmatch(digits) or (is_fraction and _ONE_COMMA.fullmatch(digits)):
        digits = digits.replace(",", ".")
    digits = digits.replace(",", "").replace("_", "")
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
    if len(digits) > _WHOLE_DIGITS:
        significant = digits.lstrip("+-0.").replace(".", "")
        if len(significant) > _WHOLE_DIGITS:
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


class Precision:
    """The precision of one column of a log that may leave out trailing zeros.

    `2.5` among numbers with four decimals was printed as precisely as they were. The most
    decimals and the most significant digits so far are kept, and the coarser of the two
    is the precision: `round(x, 4)` fixes the former, `%.4g` the latter. A number with one
    significant digit is taken as printed with `least_digits`.
    """

    __slots__ = ("_is_fraction", "_least_digits", "_number", "_text", "decimals", "digits", "whole")

    def __init__(self, least_digits: int = 1, *, is_fraction: bool = False) -> None:
        self._least_digits = least_digits
        self._is_fraction = is_fraction
        self._text = ""
        self._number: Number | None = None
        """What the last text was."""
        self.decimals = -400
        self.digits = 0
        self.whole = False

    def read(self, text: str) -> Number | None:
        """The number that a text of this column is; None where it is none."""
        if text != self._text:
            number = parse_number(text, is_fraction=self._is_fraction)
            if number is not None and self._least_digits > 1:
                number = at_least_digits(number, self._least_digits)
            self._text = text
            self._number = None if number is None else self.refine(number)
        return self._number

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
