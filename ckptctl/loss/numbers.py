"""What number does a piece of text say, and how finely was it printed?

Every spelling that a training log has: thousands separators, suffixes, percent
signs, NaN and infinity. What a number means is the question of `formats.keys`.
"""

from __future__ import annotations

import math
import re
import sys
from functools import lru_cache

from ckptctl.loss.rows import Number

_NUMBER = re.compile(
    r"(?P<digits>[-+]?(?:\d[\d,_]*\.?\d*|\.\d+))(?:[eE](?P<power>[-+]?\d{1,4}))?"
    r"\s?(?P<suffix>[KkMGTPB])?(?P<unit>%|ms|s|sec)?"
)
# As Python, C, Java, JSON libraries and the old Windows runtime print them.
_NAN = re.compile(r"[-+]?(?:nan(?:\([^)]*\))?|1\.#(?:QNAN|SNAN|IND)0*|1\.\$)", re.IGNORECASE)
_INFINITY = re.compile(r"(?P<sign>[-+]?)(?:inf(?:inity)?|1\.#INF0*|∞)", re.IGNORECASE)

_SUFFIXES = {"K": 3, "k": 3, "M": 6, "G": 9, "B": 9, "T": 12, "P": 15}
_UNITS = {"%": -2, "ms": -3}

# More digits than this are a whole float, printed so that it reads back.
_WHOLE_DIGITS = 15


def parse_number(text: str) -> Number | None:
    """The number that `text` is, in whole units: `1.2K` is 1200, `50%` 0.5, `30ms` 0.03.

    None where it is none. NaN and infinity have quantum 0.
    """
    try:
        # Nine of ten texts are as Python prints numbers.
        value = float(text)
    except ValueError:
        return _in_other_words(text.strip().strip("'\""))
    if value - value != 0:
        return Number(value, 0.0)
    mantissa, _, power = text.replace("E", "e").partition("e")
    return Number(value, _unit(mantissa.replace("_", "").strip(), int(power or 0)))


def _in_other_words(text: str) -> Number | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return _not_finite(text)
    digits = match["digits"].replace(",", "").replace("_", "")
    power = int(match["power"] or 0) + _SUFFIXES.get(match["suffix"], 0)
    power += _UNITS.get(match["unit"], 0)
    return Number(float(f"{digits}e{power}"), _unit(digits, power))


def _unit(digits: str, power: int) -> float:
    """What one unit of the last digit is worth; 0 where so many digits are a whole float."""
    if len(digits) > _WHOLE_DIGITS and _significant(digits) > _WHOLE_DIGITS:
        return 0.0
    dot = digits.find(".")
    return power_of_ten(power if dot < 0 else power - (len(digits) - dot - 1))


@lru_cache(maxsize=1024)
def power_of_ten(power: int) -> float:
    """The float that is nearest to this power of ten, finite whatever the power."""
    # A zero may be written with any exponent: `0e400` has a unit that no float holds.
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
    """How finely one column of a log is printed, where trailing zeros may be left out.

    `2.5` among numbers of four decimals is no coarser than they are. The finest seen
    so far counts, in decimals and in significant digits, and the coarser of the two
    is believed: `round(x, 4)` fixes the one, `%.4g` the other.
    """

    __slots__ = ("_decimals", "_digits", "_whole")

    def __init__(self) -> None:
        self._decimals = -400
        self._digits = 0
        self._whole = False

    def refine(self, number: Number) -> Number:
        """The number with the unit that its column has; whole floats stay whole."""
        if self._whole or number.quantum == 0:
            self._whole = self._whole or math.isfinite(number.value)
            return Number(number.value, 0.0)
        decimals = _decimals_of(number.quantum)
        self._decimals = max(self._decimals, decimals)
        power = -self._decimals
        if number.value:
            magnitude = math.floor(math.log10(abs(number.value)))
            self._digits = max(self._digits, magnitude + decimals + 1)
            power = max(power, magnitude - self._digits + 1)
        if power >= -decimals:
            return number
        return Number(number.value, power_of_ten(power))


@lru_cache(maxsize=1024)
def _decimals_of(quantum: float) -> int:
    return -round(math.log10(quantum))


def at_least_digits(number: Number, digits: int) -> Number:
    """The number with a unit that leaves it so many significant digits, where it had one."""
    if not number.value or not number.quantum:
        return number
    magnitude = math.floor(math.log10(abs(number.value)))
    if round(number.value / number.quantum) >= 10:
        return number
    return Number(number.value, power_of_ten(magnitude - digits + 1))
