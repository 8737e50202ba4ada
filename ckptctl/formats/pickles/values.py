"""Decode the values of pickled records and sidecars.

The `data.pkl` of a record, a `train_state.pt`: numbers, strings, containers of
them, and tensors as `TensorStub`. Whatever else is in it becomes an `Opaque`
that only keeps its name; nothing of it runs. What the values mean for a
resume is `train_state`'s question, whether a stub fits the metadata `records`'.

Source: torch 2.13 `torch/_utils.py` and `torch/serialization.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ckptctl.data_classes import dataclass, replace
from ckptctl.errors import MetadataUnreadable
from ckptctl.formats.pickles.reading import read_pickle
from ckptctl.formats.pickles.stubs import (
    COMMON,
    DTYPES,
    Callee,
    Dtype,
    Function,
    Grammar,
    Malformed,
    Stub,
    checked_dims,
    shown,
)
from ckptctl.model import DTYPE_SIZES

MAX_DEPTH = 100
FREE_NODES = 1_000_000
"""How many parts a value may have, what is shared counted each time it is met; one for
each byte of a larger pickle."""


@dataclass(frozen=True, slots=True)
class TensorStub:
    """A tensor as its pickle describes it; the elements are elsewhere.

    `shape`, `strides` and `storage_offset` are in elements, `strides` and `shape`
    one entry per dimension. `storage_key` names the archive's member
    (`data/{storage_key}`), which holds `n_elements_in_storage`. `signs` are what is still
    to be done to the elements after they are read: `conj`, `neg`, and `quantized` where they
    stand for other numbers by a scale that the pickle holds, too.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    storage_key: str
    n_elements_in_storage: int
    signs: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """The number of the last element in the storage, counted from 0."""
        steps = ((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.storage_offset + sum(steps)


class ShardStub(NamedTuple):
    """One rank's part of a tensor.

    `shape` is that of the whole tensor. `dims` are, for each dimension of the mesh, the
    dimension of the tensor that it cuts, None where it replicates; `coordinate` is where the
    rank is in the mesh. `is_plain` is false for other placements: strided and partial ones.
    """

    local: TensorStub
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    coordinate: tuple[int, ...]
    is_plain: bool


class Opaque(Stub, Callee):
    """Something that is no plain value: only its `name`, and the state it was given.

    Two of one name are not equal: what they were is not known.
    """

    __slots__ = ()

    owns_state = False

    @property
    def name(self) -> str:
        """What the pickle calls it: `argparse.Namespace`, `numpy.dtype`, `persistent id`."""
        return self.kind

    def call(self, args: tuple[object, ...]) -> Opaque:  # noqa: ARG002
        """What comes of calling it: of the same name, and as unknown."""
        return Opaque(self.kind)

    def build(self, state: object) -> None:
        """Keep the state that was given last."""
        self.state = state

    def __repr__(self) -> str:
        return f"Opaque({shown(self.name)})"


def decode_value(data: bytes) -> object:
    """The value that a pickle holds, with `Opaque` and `TensorStub` for what is not plain.

    No deeper than `MAX_DEPTH`, free of cycles, and small enough to be compared,
    printed and walked. Raises `MetadataUnreadable` for anything else, and
    `MetadataUnsafe` for opcodes that no writer of checkpoints uses.
    """
    return checked_value(read_pickle(data, TOLERANT), len(data))


def decode_tensor_pickle(data: bytes) -> TensorStub:
    """The tensor that the `data.pkl` of a tensor's record describes.

    Raises `MetadataUnsafe` for any name beyond those that rebuild a tensor,
    `MetadataUnreadable` for damage and for a pickle of something else.
    """
    value = read_pickle(data, _STRICT)
    if not isinstance(value, TensorStub):
        raise MetadataUnreadable(f"the pickle holds a {type(value).__name__}, not a tensor")
    return value


def decode_state(data: bytes) -> object:
    """As `decode_value`, for values that are to be written again.

    What would not come out as it went in is an `Opaque`: paths, which are strings to
    `decode_value`, and tensors whose elements are conjugated or negated when they are read.
    """
    return checked_value(read_pickle(data, FAITHFUL), len(data))


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Storage:
    """The elements of one or several tensors, as a pickle names them."""

    dtype: str | None
    key: str
    size: int
    """In elements; in bytes where there is no dtype."""


STORAGE_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}


def _storage(persistent_id: object) -> object:
    match persistent_id:
        case ("storage", _StorageType(dtype), str(key), str(), int(size)) if 0 <= size < 1 << 63:
            return Storage(dtype, key, size)
    raise Malformed("a persistent id that names no storage of a tensor")


def legacy_storage(persistent_id: object) -> Storage:
    """The storage that a persistent id names in a file from before torch 1.6.

    A view of another storage is not supported: torch has written none since 0.4.
    """
    match persistent_id:
        case ("storage", _StorageType(), str(), str(), int(), None):
            found = _storage(persistent_id[:5])
            if isinstance(found, Storage):
                return found
    raise Malformed("a persistent id that names no storage of a tensor")


def _storage_or_opaque(persistent_id: object) -> object:
    try:
        return _storage(persistent_id)
    except Malformed:
        return Opaque("persistent id")


def _rebuild_v2(args: tuple[object, ...]) -> object:
    match args:
        case (Storage(str(dtype)) as storage, offset, shape, strides, bool(), *more):
            signs = _signs(more[1:])
            return _stub(dtype, storage.key, storage.size, offset, shape, strides, signs)
    raise Malformed("a tensor is not rebuilt from a storage, an offset, a shape and strides")


def _rebuild_v3(args: tuple[object, ...]) -> object:
    match args:
        case (Storage() as storage, offset, shape, strides, bool(), _, Dtype(dtype), *more):
            n_bytes = storage.size * DTYPE_SIZES.get(storage.dtype or "", 1)
            n_elements, rest = divmod(n_bytes, DTYPE_SIZES.get(dtype, 1))
            if rest:
                raise Malformed(f"{n_bytes:,} bytes are no whole number of {dtype} elements")
            return _stub(dtype, storage.key, n_elements, offset, shape, strides, _signs(more))
    raise Malformed("a tensor is not rebuilt from a storage, a shape, strides and a dtype")


def _signs(more: list[object]) -> tuple[str, ...]:
    # A conjugated view is saved as the elements beneath it, and a word that it is one.
    flags = more[0] if more else None
    return tuple(sign for sign in ("conj", "neg") if isinstance(flags, dict) and flags.get(sign))


def _stub(
    dtype: str,
    key: str,
    n_elements: int,
    offset: object,
    shape: object,
    strides: object,
    signs: tuple[str, ...],
) -> TensorStub:
    dims = checked_dims(shape, "the shape of a tensor")
    steps = checked_dims(strides, "the strides of a tensor")
    (start,) = checked_dims((offset,), "the offset of a tensor")
    if len(dims) != len(steps):
        raise Malformed(f"a tensor of {len(dims)} dimensions has {len(steps)} strides")
    return TensorStub(dtype, dims, steps, start, key, n_elements, signs)


def _rebuild_parameter(args: tuple[object, ...]) -> object:
    if args and isinstance(args[0], TensorStub):
        return args[0]
    raise Malformed("a parameter is not rebuilt from a tensor")


@dataclass(frozen=True, slots=True)
class _Scheme:
    name: str


def _rebuild_quantized(args: tuple[object, ...]) -> object:
    match args:
        case (Storage(str(dtype)) as storage, offset, shape, strides, (_Scheme(), *_), bool(), *_):
            quantized = ("quantized",)
            return _stub(dtype, storage.key, storage.size, offset, shape, strides, quantized)
    raise Malformed("a quantized tensor is not rebuilt from a storage and a quantizer")


_QUANTIZED: Mapping[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_qtensor"): Function("_rebuild_qtensor", _rebuild_quantized),
    **{
        ("torch", name): _Scheme(name)
        for name in (
            "per_tensor_affine",
            "per_tensor_symmetric",
            "per_channel_affine",
            "per_channel_symmetric",
            "per_channel_affine_float_qparams",
        )
    },
}

_TENSORS: Mapping[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): Function("_rebuild_tensor_v2", _rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Function("_rebuild_tensor_v3", _rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): Function("_rebuild_parameter", _rebuild_parameter),
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    ("torch", "UntypedStorage"): _StorageType(None),
    **{("torch", name): _StorageType(dtype) for name, dtype in STORAGE_DTYPES.items()},
}

_ORDERED = ("collections", "OrderedDict")
_STRICT = Grammar(
    {**DTYPES, **_TENSORS, **_QUANTIZED, _ORDERED: COMMON[_ORDERED]}, persistent=_storage
)


def _unknown(module: str, name: str) -> Opaque:
    return Opaque(f"{module}.{name}" if len(module) + len(name) < 200 else "a very long name")


def _latin1(args: tuple[object, ...]) -> bytes:
    # Protocol 2 writes bytes as `_codecs.encode(text, "latin1")`.
    match args:
        case (str(text), "latin1" | "latin-1"):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:
                pass
    raise Malformed("bytes are not made of a latin-1 string")


def _no_bytes(args: tuple[object, ...]) -> bytes:
    # Protocol 2 writes `b""` as `bytes()`.
    if args:
        raise Malformed("bytes are made of arguments")
    return b""


TOLERANT = Grammar(
    {
        **COMMON,
        **_TENSORS,
        ("_codecs", "encode"): Function("_codecs.encode", _latin1),
        ("__builtin__", "bytes"): Function("bytes", _no_bytes),
    },
    other=_unknown,
    persistent=_storage_or_opaque,
    hashable=float | Opaque,
    max_int_bytes=64,
)


def _as_stored(
    rebuild: Callable[[tuple[object, ...]], object], n_usual: int
) -> Callable[[tuple[object, ...]], object]:
    """Give what a tensor is rebuilt from, unless an argument states how elements are read."""

    def rebuilt(args: tuple[object, ...]) -> object:
        if any(args[n_usual:]):
            return Opaque("a conjugated or negated tensor")
        return rebuild(args)

    return rebuilt


class TimeDelta(NamedTuple):
    """A `datetime.timedelta` of a pickle, by its arguments."""

    days: int
    seconds: int
    microseconds: int


def _time_delta(args: tuple[object, ...]) -> object:
    match args:
        case (int(days), int(seconds), int(microseconds)):
            return TimeDelta(days, seconds, microseconds)
    return Opaque("datetime.timedelta")


FAITHFUL = replace(
    TOLERANT,
    names={
        ("datetime", "timedelta"): Function("datetime.timedelta", _time_delta),
        **{key: value for key, value in TOLERANT.names.items() if "pathlib" not in key[0]},
        ("torch._utils", "_rebuild_tensor_v2"): Function(
            "_rebuild_tensor_v2", _as_stored(_rebuild_v2, 6)
        ),
        ("torch._utils", "_rebuild_tensor_v3"): Function(
            "_rebuild_tensor_v3", _as_stored(_rebuild_v3, 7)
        ),
    },
)


def checked_value(value: object, n_bytes: int) -> object:
    """The value of a pickle of `n_bytes`, if it can be walked.

    A container that is shared counts each time it is met, and is visited once. Raises
    `MetadataUnreadable` for one that is too deep, or far larger than its pickle.
    """
    limit = max(FREE_NODES, n_bytes)
    extents: dict[int, tuple[int, int] | None] = {}
    pending = [value]
    while pending:
        holder = pending[-1]
        inner = _inside(holder)
        holders = [item for item in inner if isinstance(item, _HOLDERS)]
        if id(holder) not in extents:
            extents[id(holder)] = None
            pending.extend(item for item in holders if id(item) not in extents)
            continue
        pending.pop()
        if extents[id(holder)] is not None:
            continue
        depth, n_nodes = 0, 1 + len(inner)
        for item in holders:
            extent = extents[id(item)]
            if extent is None:
                raise MetadataUnreadable("a container holds itself")
            depth, n_nodes = max(depth, extent[0]), n_nodes + extent[1]
        if depth >= MAX_DEPTH:
            raise MetadataUnreadable(f"a value is nested deeper than {MAX_DEPTH} levels")
        if n_nodes > limit:
            raise MetadataUnreadable(f"a value has more than {limit:,} parts, sharing undone")
        extents[id(holder)] = (depth + 1, n_nodes)
    return value


_HOLDERS = (dict, list, tuple, set, frozenset, Opaque)


def _inside(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return (value.state,) if isinstance(value, Opaque) else ()
