"""Decode the values of pickled records and sidecars.

The `data.pkl` of a record, a `train_state.pt`: numbers, strings, containers of
them, and tensors as `TensorStub`. Whatever else is in it becomes an `Opaque`
that only keeps its name; nothing of it runs. What the values mean for a
resume is `train_state`'s question, whether a stub fits the metadata `records`'.

Source: torch 2.13 `torch/_utils.py` (`_rebuild_wrapper_subclass`), `torch/_tensor.py`
(`_rebuild_from_type_v2`), `torch/serialization.py`, `torch/distributed/device_mesh.py`,
`torch/distributed/tensor/_dtensor_spec.py`, `placement_types.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.archive.directory import ZIP_MAGIC
from ckptctl.formats.archive.foreign import is_tar, pickles_in_archive
from ckptctl.formats.pickles import policy
from ckptctl.formats.pickles.policy import NamedGlobal, Opaque, Standing
from ckptctl.formats.pickles.reading import PickleRead, read_pickle, read_pickle_at
from ckptctl.formats.pickles.stubs import (
    COMMON,
    DTYPES,
    Acts,
    Callee,
    Dtype,
    Function,
    Grammar,
    Malformed,
    OrderedDictStub,
    checked_dims,
)
from ckptctl.model import DTYPE_SIZES

MAX_DEPTH = 100
FREE_NODES = 1_000_000
"""How many parts a value may have, what is shared counted each time it is met; one for
each byte of a larger pickle."""


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements, as torch counts them."""
    strides: list[int] = []
    step = 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


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

    @classmethod
    def row_major(cls, dtype: str, shape: tuple[int, ...], key: str = "") -> TensorStub:
        """A row-major tensor that fills its storage."""
        return cls(dtype, shape, strides_of(shape), 0, key, prod(shape))

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


class Decoded(NamedTuple):
    """The value of a pickle, and the globals in it that nothing is known of, sorted."""

    value: object
    unknown: tuple[str, ...]


def decode_value(data: bytes) -> object:
    """The value that a pickle holds; see `decode`."""
    return decode(data).value


def decode(data: bytes, grammar: Grammar | None = None) -> Decoded:
    """What a pickle holds, with `Opaque` and `TensorStub` for what is not plain.

    No deeper than `MAX_DEPTH`, free of cycles, and small enough to be compared,
    printed and walked; what is not is one `Opaque`. Raises `MetadataUnsafe` for a pickle that
    would run code where it is loaded, also one in its bytes, and `MetadataUnreadable` for a
    damaged one.
    """
    grammar = grammar or TOLERANT
    read = read_pickle_at(data, 0, grammar)
    unknown = unknown_in([read], grammar)
    if read.fault is not None:
        raise read.fault
    if read.end != len(data):
        raise MetadataUnreadable(
            f"byte {read.end - 1:,}: {len(data) - read.end:,} bytes follow the end of the pickle"
        )
    return Decoded(checked_value(read.value, len(data)), unknown)


def decode_all(data: bytes, grammar: Grammar | None = None) -> Decoded:
    """The first of the pickles in a file, and the unknown globals of all; more bytes may follow.

    `torch.load` and several `pickle.load` read one after the other. Raises as `decode`.
    """
    grammar = grammar or TOLERANT
    reads, faulty, at = _pickles_in(data, grammar)
    unknown = unknown_in(reads, grammar)
    if faulty is not None:
        unknown_in([faulty], grammar)
        if faulty.fault is not None and (not reads or data[at] == 0x80):
            raise faulty.fault
        # Otherwise what follows is no pickle.
    return Decoded(checked_value(reads[0].value, len(data)), unknown)


def _pickles_in(data: bytes, grammar: Grammar) -> tuple[list[PickleRead], PickleRead | None, int]:
    """The whole pickles that bytes begin with, what was read of a damaged one, and where it is."""
    reads: list[PickleRead] = []
    at = 0
    while len(reads) < MAX_PICKLES and (at < len(data) or not reads):
        read = read_pickle_at(data, at, grammar)
        if read.fault is not None:
            return reads, read, at
        reads.append(read)
        at = read.end
    return reads, None, at


MAX_PICKLES = 64
"""So many pickles of one file are read, one after the other; `torch.save` wrote five."""

MAX_NESTED = 8
"""How deep pickles may lie in the bytes of pickles. TorchTitan's data position is at 1."""


def unknown_in(reads: Iterable[PickleRead], grammar: Grammar, depth: int = 0) -> tuple[str, ...]:
    """The unknown globals of pickles, and of those that lie in their bytes.

    Raises `MetadataUnsafe` where a pickle in their bytes would run code. Bytes that are no
    whole pickle are none.
    """
    unknown: set[str] = set()
    for read in reads:
        for other in read.others:
            if isinstance(other, NamedGlobal) and other.standing is Standing.UNKNOWN:
                unknown.add(other.name)
        for inner in read.nested:
            unknown.update(_nested_unknown(inner, grammar, depth + 1))
    return tuple(sorted(unknown))


def check_bytes(data: bytes) -> tuple[str, ...]:
    """The unknown globals of bytes that may be a pickle; raises `MetadataUnsafe` as `decode`."""
    return tuple(sorted(_nested_unknown(data, TOLERANT, 1)))


def _nested_unknown(data: bytes, grammar: Grammar, depth: int) -> Iterable[str]:
    if not data.startswith(ZIP_MAGIC) and not is_tar(data):
        return _unknown_in_bytes(data, grammar, depth)
    unknown: set[str] = set()
    for inner in pickles_in_archive(data):
        unknown.update(_unknown_in_bytes(inner, grammar, depth))
    return unknown


def _unknown_in_bytes(data: bytes, grammar: Grammar, depth: int) -> Iterable[str]:
    if depth > MAX_NESTED and data[:1] == b"\x80":
        raise MetadataUnsafe(f"holds pickles in pickles, deeper than {MAX_NESTED} levels")
    try:
        reads, faulty, _ = _pickles_in(data, grammar)
        if faulty is not None:
            unknown_in([faulty], grammar, depth)
    except MetadataUnsafe as error:
        # Random bytes hold opcodes that no writer uses, but they do not name `os.system`.
        if "opcode" not in error.message or (data[:1] == b"\x80" and data[-1:] == b"."):
            raise MetadataUnsafe(f"holds bytes that are a pickle, which {error.message}") from error
    return unknown_in(reads, grammar, depth)


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
    return decode(data, FAITHFUL).value


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


def _storage_or_opaque(persistent_id: object) -> object:
    match persistent_id:
        case ("module", NamedGlobal() as cls, *_):  # with its source, from before torch 1.6
            return cls
    try:
        return _storage(persistent_id)
    except Malformed:
        return Opaque("persistent id")


_IN_BYTES = "a tensor in bytes"


def _rebuild_v2(args: tuple[object, ...]) -> object:
    match args:
        case (Opaque(), *_):  # a storage that `_load_from_bytes` made of bytes in the pickle
            return Opaque(_IN_BYTES)
        case (Storage(str(dtype)) as storage, offset, shape, strides, bool(), *more):
            signs = _signs(more[1:])
            return _stub(dtype, storage.key, storage.size, offset, shape, strides, signs)
    raise Malformed("a tensor is not rebuilt from a storage, an offset, a shape and strides")


def _rebuild_v3(args: tuple[object, ...]) -> object:
    match args:
        case (Opaque(), *_):
            return Opaque(_IN_BYTES)
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
    if args and isinstance(args[0], (TensorStub, Opaque)):
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


def _latin1(args: tuple[object, ...]) -> bytes:
    # Protocol 2 writes bytes as `_codecs.encode(text, "latin1")`.
    match args:
        case (str(text), "latin1" | "latin-1"):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError as error:
                raise Malformed("bytes are not made of a latin-1 string") from error
        case (str(), str(codec), *_) if _is_other_codec(codec):
            raise Acts("encodes a string with another codec than latin-1")
    raise Malformed("bytes are not made of a latin-1 string")


def _is_other_codec(name: str) -> bool:
    """Whether Python has a codec of this name; it raises an error for any other."""
    from encodings import aliases, normalize_encoding

    if name in ("utf-8", "ascii"):
        return False
    normalized = normalize_encoding(name[:100]).lower()
    others = ("idna", "punycode", "raw_unicode_escape", "unicode_escape", "utf_8_sig", "undefined")
    return normalized in (*aliases.aliases, *aliases.aliases.values(), *others)


def _bytes(args: tuple[object, ...]) -> bytes:
    # Protocol 2 writes `b""` as `bytes()`; what else makes bytes may make a pickle.
    match args:
        case ():
            return b""
        case (bytes(value) | bytearray(value),):
            return bytes(value)
        case (list(values) | tuple(values),) if all(type(value) is int for value in values):
            try:
                return bytes(values)
            except ValueError:
                pass
        case (str(text), str(encoding)):
            return text.encode("utf-8" if encoding in ("utf-8", "utf8") else "latin-1", "replace")
    raise Malformed("bytes are made of other arguments than writers use")


def _storage_in_bytes(args: tuple[object, ...]) -> object:
    # It gives the bytes to `torch.load`: those that lie in the pickle are read as a pickle.
    match args:
        case (bytes() | bytearray(),):
            return Opaque("torch.storage._load_from_bytes", args)
    raise Acts("loads bytes that are computed, with torch.storage._load_from_bytes")


def _random_state(args: tuple[object, ...]) -> object:
    # `constructor(name)`, called by numpy: the second argument is the function.
    match args[1:]:
        case () | (NamedGlobal(name="numpy.random._pickle.__bit_generator_ctor"),):
            return Opaque("numpy.random", args)
    raise Acts("has numpy.random call another function than its own")


def _global_of_numpy(args: tuple[object, ...]) -> object:
    # It imports a module and returns what a name stands for in it.
    match args:
        case (str(module), str(name)) if policy.is_below(module, "numpy"):
            return policy.reference(module, name)
        case (str(module), str(name)) if policy.is_below(module, "scipy.special"):
            return policy.reference(module, name)
    raise Acts("imports what is no function of numpy, with numpy._ufunc_reconstruct")


def _rebuild_from_type(args: tuple[object, ...]) -> object:
    # A tensor with attributes: the function that rebuilds it is the first argument.
    match args:
        case (Callee() as rebuild, _, tuple(made), *_):
            return rebuild.call(made)
    raise Malformed("a tensor is not rebuilt by a function of a tuple")


def _ordered(args: tuple[object, ...]) -> object:
    # Python 2 gives the items to the call; 3 sets them afterwards.
    return Opaque("collections.OrderedDict", args) if args else OrderedDictStub()


def _default(args: tuple[object, ...]) -> object:
    return Opaque("collections.defaultdict", args) if args[1:] else OrderedDictStub()


_CALLS: Mapping[tuple[str, str], Callable[[tuple[object, ...]], object]] = {
    ("_codecs", "encode"): _latin1,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): lambda args: bytearray(_bytes(args)),
    ("builtins", "getattr"): policy.attribute,
    ("builtins", "iter"): policy.iterator,
    ("builtins", "type"): policy.type_of,
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _default,
    ("copyreg", "__newobj__"): policy.instance,
    ("copyreg", "__newobj_ex__"): policy.instance_with_keywords,
    ("copyreg", "_reconstructor"): lambda args: policy.instance((*args[:1], *args[2:])),
    ("functools", "partial"): policy.partial,
    ("functools", "reduce"): policy.union_of_types,
    ("_functools", "reduce"): policy.union_of_types,
    ("_operator", "getitem"): policy.item,
    ("operator", "getitem"): policy.item,
    ("torch._tensor", "_rebuild_from_type"): _rebuild_from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("torch.storage", "_load_from_bytes"): _storage_in_bytes,
    ("numpy.random._pickle", "__generator_ctor"): _random_state,
    ("numpy.random._pickle", "__randomstate_ctor"): _random_state,
    ("numpy.core", "_ufunc_reconstruct"): _global_of_numpy,
    ("numpy._core", "_ufunc_reconstruct"): _global_of_numpy,
    ("numpy.core._umath", "_ufunc_reconstruct"): _global_of_numpy,
    ("numpy._core._umath", "_ufunc_reconstruct"): _global_of_numpy,
}
"""Functions of whose arguments it depends what comes of them, by the names of Python 3."""

TOLERANT = Grammar(
    {
        **COMMON,
        **_TENSORS,
        **{
            key: Function(".".join(name), stand_in)
            for name, stand_in in _CALLS.items()
            for key in policy.names_in_all_pythons(*name)
        },
    },
    other=policy.reference,
    persistent=_storage_or_opaque,
    hashable=float | Opaque,
    max_int_bytes=64,
    lenient=True,
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


def _as_it_is(name: str) -> Function:
    return Function(name, lambda args: Opaque(name, args))


FAITHFUL = replace(
    TOLERANT,
    names={
        ("datetime", "timedelta"): Function("datetime.timedelta", _time_delta),
        **{key: value for key, value in TOLERANT.names.items() if "pathlib" not in key[0]},
        ("collections", "defaultdict"): _as_it_is("collections.defaultdict"),
        ("torch._utils", "_rebuild_tensor_v2"): Function(
            "_rebuild_tensor_v2", _as_stored(_rebuild_v2, 6)
        ),
        ("torch._utils", "_rebuild_tensor_v3"): Function(
            "_rebuild_tensor_v3", _as_stored(_rebuild_v3, 7)
        ),
    },
)


# Tensors of which a rank saved its part: the DTensors of torch

SUBCLASS = "a tensor of a class that is not read"


class _Wrapper(NamedTuple):
    shape: tuple[int, ...]


def decode_shards(data: bytes) -> object:
    """As `decode_state`, but a DTensor becomes a `ShardStub`.

    A tensor with attributes of its own, as DeepSpeed gives its partitions, becomes a `TensorStub`
    without them.
    """
    return decode(data, _SHARDS).value


def _wrapper(args: tuple[object, ...]) -> object:
    match args:
        case (Opaque(), Dtype(), shape, *_):
            return _Wrapper(checked_dims(shape, "the shape of a tensor"))
    raise Malformed("a tensor subclass is not rebuilt from a class, a dtype and a shape")


def _from_type(args: tuple[object, ...]) -> object:
    match args:
        case (Callee() as rebuild, _, tuple(made), state):
            value = rebuild.call(made)
            return _shard(value, state) if isinstance(value, _Wrapper) else value
    raise Malformed("a tensor is not rebuilt by a function of a tuple")


def _shard(whole: _Wrapper, state: object) -> object:
    # A DTensor has slots, whose values are the second part of its state.
    match state[-1] if isinstance(state, tuple) and state else state:
        case {"_local_tensor": TensorStub() as local, "_spec": Opaque(state=dict(spec))}:
            pass
        case _:
            return Opaque(SUBCLASS)
    match spec:
        case {"mesh": Opaque(state={"_coordinate_on_dim": place}), "placements": tuple(held)}:
            coordinate = checked_dims(tuple(place or ()), "a place in the mesh")
        case _:
            return Opaque(SUBCLASS)
    names = [one.name.rpartition(".")[2] if isinstance(one, Opaque) else "" for one in held]
    dims = tuple(_dim(one, name) for one, name in zip(held, names, strict=True))
    is_plain = {*names} <= {"Shard", "Replicate"} and len(coordinate) == len(dims)
    is_plain = is_plain and all(dim is None or dim < len(whole.shape) for dim in dims)
    return ShardStub(local, whole.shape, dims, coordinate, is_plain)


def _dim(placement: object, name: str) -> int | None:
    match placement:
        case Opaque(state={"dim": int(dim)}) if name == "Shard" and dim >= 0:
            return dim
    return None


_SHARDS = replace(
    FAITHFUL,
    names={
        **FAITHFUL.names,
        ("torch._tensor", "_rebuild_from_type_v2"): Function("_rebuild_from_type_v2", _from_type),
        ("torch._utils", "_rebuild_wrapper_subclass"): Function(
            "_rebuild_wrapper_subclass", _wrapper
        ),
    },
)


def checked_value(value: object, n_bytes: int) -> object:
    """The value of a pickle of `n_bytes`, if it can be walked; else an `Opaque` that says why not.

    A container that is shared counts each time it is met, and is visited once. What lies in
    an `Opaque` is not walked.
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
                return Opaque("a container that holds itself")
            depth, n_nodes = max(depth, extent[0]), n_nodes + extent[1]
        if depth >= MAX_DEPTH:
            return Opaque(f"a value nested deeper than {MAX_DEPTH} levels")
        if n_nodes > limit:
            return Opaque(f"a value of more than {limit:,} parts, sharing undone")
        extents[id(holder)] = (depth + 1, n_nodes)
    return value


_HOLDERS = (dict, list, tuple, set, frozenset)


def _inside(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list | tuple | set | frozenset) else ()
