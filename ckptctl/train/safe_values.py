"""Load a pickled entry without running code from it.

`torch.load(weights_only=True)` creates numbers, strings, containers and tensors; this
module lists the further types that it may create. torch's planner unpickles its input
without restrictions, so it gets a new pickle of the safely loaded value.
"""

from __future__ import annotations

import codecs
import datetime
import decimal
import fractions
import io
import pathlib
import re
import uuid
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from ckptctl.errors import RecordUnsafe

SAFE_TYPES: tuple[type, ...] = (
    frozenset,
    range,
    slice,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PurePosixPath,
    pathlib.PosixPath,
    pathlib.PureWindowsPath,
    pathlib.WindowsPath,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    bytes,
    bytearray,
    complex,
    set,
)
"""In addition to what torch allows (tensors, numbers, strings, bytes, dict, list, tuple, set,
`OrderedDict`, `Counter`, `torch.Size`, dtypes, devices): plain values, none of which calls
anything when created. NumPy's arrays and numbers too, if NumPy is installed.
The last four are torch's own from 2.5 on, but for bytes of length 0, which no torch takes."""

_MAKES_BYTES = codecs.encode
"""Pickle protocol 2 creates bytes, dates and arrays with it; torch allows it from 2.5 on."""

_REFUSED = re.compile(r"GLOBAL ([\w.<>]+)|add_safe_globals`,? but got <class '([\w.<>]+)'>")
_NUMBERS = "?bhilqBHILQefdgFDGSUVMm"
"""Codes of NumPy's dtypes: numbers, texts, records and times, but not objects."""


def safe_copy(record: bytes, fqn: str, safe_types: Iterable[Any] = ()) -> io.BytesIO:
    """A record that ckptctl writes of the value in `record`; see `safe_value`."""
    copy = io.BytesIO()
    torch.save(safe_value(record, fqn, safe_types), copy)
    copy.seek(0)
    return copy


def safe_value(record: bytes, fqn: str, safe_types: Iterable[Any] = ()) -> Any:
    """The value in `record`, an archive of `torch.save`.

    Raises `RecordUnsafe` for a type that is neither known to be safe nor in `safe_types`.
    """
    allowed = [_MAKES_BYTES, *_known(), *safe_types]
    # A value from a device that this machine lacks is loaded on the CPU.
    where = None if torch.cuda.is_available() else "cpu"
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        return torch.load(io.BytesIO(record), map_location=where, weights_only=True)
    except Exception as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            first, *_ = str(error).splitlines() or [""]
            raise RecordUnsafe(
                f"entry {fqn} cannot be loaded safely ({type(error).__name__}: {first[:200]}); "
                "no code from it was run"
            ) from error
        name = refused[1] or refused[2]
        raise RecordUnsafe(
            f"entry {fqn} asks for {name}, which may run code, so it was not loaded and did not "
            "run. You can allow your own type in your own step: "
            f"Reader(..., safe_types=[{name}])"
        ) from error
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@lru_cache(maxsize=1)
def _known() -> tuple[Any, ...]:
    """`SAFE_TYPES`, and what makes arrays and numbers of NumPy, under its old and new names."""
    try:
        array = torch.zeros(1, dtype=torch.float64).numpy()
    except RuntimeError:  # torch without NumPy
        return SAFE_TYPES
    make_array: Any = array.__reduce__()[0]
    make_number: Any = array[0].__reduce__()[0]
    dtype: Any = next(base for base in type(array.dtype).__mro__ if base.__name__ == "dtype")
    numbers = {type(dtype(code)) for code in _NUMBERS}
    named = [
        _named(make, f"numpy.{core}.multiarray")
        for make in (make_array, make_number)
        for core in ("core", "_core")
    ]
    return (*SAFE_TYPES, type(array), dtype, *numbers, *named)


def _named(make: Any, module: str) -> object:
    """Allows `make` as one of a module that is not its own."""
    if hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        return make, f"{module}.{make.__name__}"

    def of_that_name(*args: object) -> object:
        return make(*args)

    # torch before 2.6 looks up allowed types by name.
    of_that_name.__module__, of_that_name.__name__ = module, make.__name__
    return of_that_name
