"""The dtypes and classes of torch, by the names that pickles use.

The parts of a grammar that metadata and the pickles inside records share:
dtypes, `torch.Size`, `OrderedDict`, paths. Each stands for a plain value or for
a function that makes one; none of them is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptctl.formats.pickles.stubs import Function, Malformed, Ordered
from ckptctl.model import DTYPE_SIZES

MAX_DIMS = 64
"""More dimensions than torch itself allows: `c10/core/TensorImpl.h` has no tensor above 64."""

MAX_PATH_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype, by its name without `torch.`."""

    name: str


# Beside those whose size is known: the rest of torch 2.13's dtypes, all a byte but the last.
_OTHER_DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    "quint4x2",
    "quint2x4",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
)

DTYPES: Mapping[tuple[str, str], object] = {
    ("torch", name): Dtype(name) for name in (*DTYPE_SIZES, *_OTHER_DTYPES)
}


def size_of(args: tuple[object, ...]) -> tuple[int, ...]:
    """`torch.Size(dims)` as a tuple of integers, none of them negative."""
    dims = args[0] if len(args) == 1 else None
    if not isinstance(dims, tuple):
        raise Malformed("a torch.Size is not made of a tuple")
    return checked_dims(dims, "a torch.Size")


def checked_dims(dims: object, what: str) -> tuple[int, ...]:
    """`dims`, if it is a tuple or a list of 64-bit integers that a tensor can have."""
    if not isinstance(dims, tuple | list) or len(dims) > MAX_DIMS:
        raise Malformed(f"{what} is no tuple of at most {MAX_DIMS} dimensions")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < 1 << 63:
            raise Malformed(f"{what} has a dimension that is no size")
    return tuple(dims)


def _ordered(args: tuple[object, ...]) -> Ordered:
    if args:
        raise Malformed("an OrderedDict is made of arguments")
    return Ordered()


def _path_joined_by(separator: str) -> Callable[[tuple[object, ...]], str]:
    def path(args: tuple[object, ...]) -> str:
        # Python 3.13 and later give the whole path, earlier ones its parts.
        parts = [part for part in args if isinstance(part, str)]
        if len(parts) != len(args) or sum(map(len, parts)) + len(parts) > MAX_PATH_CHARS:
            raise Malformed("a path is not made of a few short strings")
        if parts and parts[0].endswith(separator):
            return parts[0] + separator.join(parts[1:])
        return separator.join(parts) or "."

    return path


SIZE = Function("torch.Size", size_of)

COMMON: Mapping[tuple[str, str], object] = {
    **DTYPES,
    ("torch", "Size"): SIZE,
    ("collections", "OrderedDict"): Function("collections.OrderedDict", _ordered),
    **{
        (module, name): Function(f"{module}.{name}", _path_joined_by(separator))
        for module in ("pathlib", "pathlib._local")
        for name, separator in (
            ("Path", "/"),
            ("PurePath", "/"),
            ("PosixPath", "/"),
            ("PurePosixPath", "/"),
            ("WindowsPath", "\\"),
            ("PureWindowsPath", "\\"),
        )
    },
}
