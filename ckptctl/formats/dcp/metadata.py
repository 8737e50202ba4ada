"""Decode a `.metadata` file.

From the bytes of `.metadata`, or of a rank-local `__{rank}.metadata`, to
`model.Metadata`, as written by torch 2.1 to 2.15 and by the planners that build
on it. The pickle is read by `pickles` under `grammar`; here its inert
objects become columns, and each chunk gets its byte range.

torch's loader looks a byte range up by (FQN, offset); the index in the key is a hint that it
may ignore. A `ChunkTable` is one tensor while that is being answered: its slices, and the
range that each was given so far.

Whether what the metadata says is complete, or fits the files, is for `checks`.

Source: torch 2.13 `torch/distributed/checkpoint/planner_helpers.py`
(`create_read_items_for_chunk_list`).
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from math import prod

from ckptctl.data_classes import dataclass, replace
from ckptctl.errors import MetadataUnreadable
from ckptctl.formats.dcp.fast_path import Dims, Parts
from ckptctl.formats.dcp.fast_path_storage import StorageRun, plan_shape, storage_shape
from ckptctl.formats.dcp.fast_path_tensors import ChunkRun, chunk_shape, tensor_shape
from ckptctl.formats.dcp.grammar import (
    BYTES,
    CHUNK,
    GRAMMAR,
    INDEX,
    METADATA,
    PROPERTIES,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    WRITE_ITEM,
    Encoded,
    Layout,
)
from ckptctl.formats.pickles.machine import Machine, Shape, Shapes
from ckptctl.formats.pickles.reading import collector_paused, read_pickle
from ckptctl.formats.pickles.stubs import Dtype, Malformed, Stub, checked_dims, shown
from ckptctl.model import (
    NO_FILE,
    ByteRange,
    BytesEntry,
    Chunks,
    Metadata,
    RangeColumns,
    TensorEntry,
)

Path = tuple[str | int, ...]
Fields = Mapping[object, object]


def fast_path_shapes(machine: Machine) -> Mapping[str, Shape]:
    """The shapes of metadata, by the object after which each is tried."""
    parts = Parts(machine)
    return {
        TENSOR: tensor_shape(parts),
        CHUNK: chunk_shape(parts),
        STORAGE_INFO: storage_shape(parts),
        WRITE_ITEM: plan_shape(parts),
    }


SMALL = 1 << 17
"""Smaller metadata (bytes) is read before its shapes would be compiled, which takes 15 ms."""


def shapes_that_pay(machine: Machine) -> Mapping[str, Shape]:
    """The shapes of metadata, none for small metadata."""
    return fast_path_shapes(machine) if machine.end >= SMALL else {}


def decode_metadata(
    data: bytes, *, rank: int | None = None, shapes: Shapes | None = shapes_that_pay
) -> Metadata:
    """The metadata in `data`; `rank` is that of a rank-local file.

    `shapes` is for tests: without it the answer is the same and takes longer.

    Raises `MetadataUnsafe` when it asks for anything but metadata's types, and
    `MetadataUnreadable` when it is damaged or says what no writer can mean.
    Nothing of it runs. Time and memory are linear in its size.
    """
    usual = shapes is shapes_that_pay
    for last in _LAST if usual else ():
        if (similar := last.with_other_ids(data, rank)) is not None:
            return similar
    with collector_paused():
        root = read_pickle(data, GRAMMAR, shapes)
        try:
            metadata = _metadata(_fields(root, METADATA), data, rank)
        except Malformed as wrong:
            raise MetadataUnreadable(str(wrong)) from None
    if usual and len(data) <= _MOST_KEPT:
        _LAST[:] = [_Decoded(data, metadata)]
    return metadata


_MOST_KEPT = 8 << 20
"""Larger metadata (bytes) is not kept until the next is decoded."""

_ID = re.compile(r"(?!\.+$)[\w.=-]+", re.ASCII)
"""A name of a folder, or an id, that a path is not changed by."""


class _Decoded:
    """Metadata and the bytes that it was decoded from.

    The steps of a run differ in two strings at the end of these bytes: the folder's name and
    the id of the save. Where all other bytes are equal, what is decoded is equal as well.
    """

    def __init__(self, data: bytes, metadata: Metadata) -> None:
        self.data, self.metadata = data, metadata
        self.ids = ((metadata.checkpoint_id or "").rpartition("/")[2], metadata.save_id or "")
        texts = [text.encode(errors="replace") for text in self.ids]
        starts = [data.find(text) for text in texts]
        ends = [start + len(text) for start, text in zip(starts, texts, strict=True)]
        # Nothing that comes before these strings can refer to them.
        found = 0 <= data.rfind(b"storage_meta") < starts[0] < ends[0] <= starts[1] < ends[1]
        once = all(data.count(text) == 1 for text in texts)
        self.spans = list(zip(starts, ends, strict=True)) if found and once else []

    def with_other_ids(self, data: bytes, rank: int | None) -> Metadata | None:
        """What `data` decodes to, if it has other bytes only in the two strings."""
        if len(data) != len(self.data) or rank != self.metadata.rank:
            return None
        at = 0
        for start, end in (*self.spans, (len(data), len(data))):
            if data[at:start] != self.data[at:start]:
                return None
            at = end
        ids = [data[start:end].decode(errors="replace") for start, end in self.spans]
        if not all(map(_ID.fullmatch, ids)):
            return None
        checkpoint_id, save_id = self.metadata.checkpoint_id, self.metadata.save_id
        if checkpoint_id and ids:
            checkpoint_id, save_id = checkpoint_id.removesuffix(self.ids[0]) + ids[0], ids[1]
        return replace(
            self.metadata,
            checkpoint_id=checkpoint_id,
            save_id=save_id,
            digest=hashlib.sha256(data).hexdigest(),
        )


_LAST: list[_Decoded] = []
"""What was decoded last: inspection goes through the steps of a run one by one."""


def _metadata(fields: Fields, data: bytes, rank: int | None) -> Metadata:
    paths = _planner_paths(_required(fields, "planner_data", METADATA))
    tensors, bytes_fqns = _entries(_required(fields, "state_dict_metadata", METADATA))
    ranges = _Ranges(tensors, bytes_fqns)
    ranges.place_all(_storage_entries(_required(fields, "storage_data", METADATA)))
    storage_meta = _storage_meta(fields.get("storage_meta"))
    return Metadata(
        tensors={
            fqn: tensor.entry(fqn, paths.get(fqn, (fqn,)), ranges.file_names)
            for fqn, tensor in tensors.items()
        },
        bytes_entries={
            fqn: BytesEntry(fqn, byte_range, paths.get(fqn, (fqn,)))
            for fqn, byte_range in ranges.of_bytes.items()
        },
        file_names=ranges.file_names,
        strays=tuple(ranges.strays),
        planner_paths=paths,
        checkpoint_id=storage_meta.get("checkpoint_id"),
        save_id=storage_meta.get("save_id"),
        version=_text_or_none(fields.get("version"), "the version"),
        rank=rank,
        n_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )


def _fields(value: object, kind: str) -> Fields:
    """The attributes of an inert object that must be of a kind."""
    if not isinstance(value, Stub) or value.kind != kind:
        raise Malformed(f"a {_kind_of(value)} is where a {kind} belongs")
    if not isinstance(value.state, dict):
        raise Malformed(f"a {kind} has no attributes")
    return value.state


def _kind_of(value: object) -> str:
    return value.kind if isinstance(value, Stub) else type(value).__name__


def _required(fields: Fields, name: str, kind: str) -> object:
    if name not in fields:
        raise Malformed(f"a {kind} has no {name}")
    return fields[name]


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is a {_kind_of(value)}, not a string")
    return value


def _text_or_none(value: object, what: str) -> str | None:
    return None if value is None else _text(value, what)


def _storage_meta(value: object) -> Mapping[str, str | None]:
    if value is None:
        return {}
    fields = _fields(value, STORAGE_META)
    names = ("checkpoint_id", "save_id")
    return {name: _text_or_none(fields.get(name), f"the {name}") for name in names}


def _planner_paths(planner_data: object) -> Mapping[str, Path]:
    """The key paths before flattening; what else a planner keeps here is its own."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        fqn: path
        for fqn, path in planner_data.items()
        if isinstance(fqn, str)
        and isinstance(path, tuple)
        and all(type(part) in (str, int) for part in path)
    }


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor while its chunks are being given their byte ranges."""

    dtype: str
    layout: str
    requires_grad: bool
    memory_format: int
    pin_memory: bool
    strides: Dims | None
    shape: Dims
    table: ChunkTable

    def entry(self, fqn: str, path: Path, file_names: list[str]) -> TensorEntry:
        """The tensor as the model has it."""
        return TensorEntry(
            fqn=fqn,
            dtype=self.dtype,
            shape=self.shape,
            chunks=self.table.chunks(len(self.shape), file_names),
            path=path,
            layout=self.layout,
            requires_grad=self.requires_grad,
            memory_format=self.memory_format,
            pin_memory=self.pin_memory,
            strides=self.strides,
        )


def _entries(state_dict: object) -> tuple[dict[str, _Tensor], list[str]]:
    """The tensors by FQN, and the FQNs of the bytes entries."""
    if not isinstance(state_dict, dict):
        raise Malformed("the entries of the state dict are in no dict")
    tensors: dict[str, _Tensor] = {}
    bytes_fqns: list[str] = []
    for fqn, value in state_dict.items():
        fqn = _text(fqn, "the name of an entry")
        if isinstance(value, Stub) and value.kind == BYTES:
            bytes_fqns.append(fqn)
            continue
        try:
            tensors[fqn] = _tensor(_fields(value, TENSOR))
        except Malformed as wrong:
            raise Malformed(f"tensor {shown(fqn)}: {wrong}") from None
    return tensors, bytes_fqns


def _tensor(fields: Fields) -> _Tensor:
    shape = checked_dims(_required(fields, "size", TENSOR), "its shape")
    if prod(shape) >= 1 << 63:
        raise Malformed("its shape has more elements than any tensor")
    chunks = _required(fields, "chunks", TENSOR)
    if not isinstance(chunks, list | tuple):
        raise Malformed(f"its chunks are in a {_kind_of(chunks)}, not in a list")
    offsets: list[Dims] = []
    sizes: list[Dims] = []
    for chunk in chunks:
        if isinstance(chunk, ChunkRun):
            _check_run(shape, chunk)
            offsets += chunk.offsets
            sizes += chunk.sizes
            continue
        part = _fields(chunk, CHUNK)
        offsets.append(_dims_like(shape, _required(part, "offsets", CHUNK)))
        sizes.append(_dims_like(shape, _required(part, "sizes", CHUNK)))
    dtype, layout, requires_grad, memory_format, pin_memory, strides = _properties(
        _required(fields, "properties", TENSOR)
    )
    if strides is not None and len(strides) != len(shape):
        raise Malformed(f"{len(shape)} dimensions, but {len(strides)} strides")
    return _Tensor(
        dtype,
        layout,
        requires_grad,
        memory_format,
        pin_memory,
        strides,
        shape,
        ChunkTable(offsets, sizes),
    )


def _dims_like(shape: Dims, value: object) -> Dims:
    dims = checked_dims(value, "a chunk")
    if len(dims) != len(shape):
        raise Malformed(f"{len(shape)} dimensions, but a chunk of {len(dims)}")
    return dims


def _check_run(shape: Dims, run: ChunkRun) -> None:
    for n_dims in {*map(len, run.offsets), *map(len, run.sizes)}:
        if n_dims != len(shape):
            raise Malformed(f"{len(shape)} dimensions, but a chunk of {n_dims}")


def _properties(value: object) -> tuple[str, str, bool, int, bool, Dims | None]:
    """dtype, layout, requires_grad, memory format, pin_memory; strides from torch 2.15 on."""
    state = value.state if isinstance(value, Stub) and value.kind == PROPERTIES else None
    if isinstance(state, tuple) and len(state) == 5:
        state = (*state, None)
    match state:
        case (
            Dtype(dtype),
            Layout(layout),
            bool(requires_grad),
            Encoded(memory_format),
            bool(pin_memory),
            strides,
        ):
            steps = None if strides is None else checked_dims(strides, "its strides")
            return dtype, layout, requires_grad, memory_format, pin_memory, steps
    raise Malformed(f"its properties are no {PROPERTIES} of torch 2.1 to 2.15")


StorageEntry = tuple[str, int | None, Dims | None, str, int, int, tuple[str, ...]]
"""FQN, hint, offset of the chunk, file, start, length and transforms of one byte range."""


def _storage_entries(storage_data: object) -> Iterator[StorageEntry]:
    if storage_data is None:
        return
    if not isinstance(storage_data, dict):
        raise Malformed("the byte ranges are in no dict")
    for key, value in storage_data.items():
        if isinstance(key, StorageRun):
            yield from zip(
                key.fqns, key.hints, key.offsets, key.files, key.starts, key.lengths, repeat(())
            )
            continue
        index, info = _fields(key, INDEX), _fields(value, STORAGE_INFO)
        fqn = _text(_required(index, "fqn", INDEX), "the name in a key of the byte ranges")
        try:
            yield (fqn, *_chunk_key(index), *_range(info))
        except Malformed as wrong:
            raise Malformed(f"a byte range of {shown(fqn)}: {wrong}") from None


def _chunk_key(index: Fields) -> tuple[int | None, Dims | None]:
    hint, offset = _required(index, "index", INDEX), index.get("offset")
    if hint is not None and type(hint) is not int:
        raise Malformed(f"its index is a {_kind_of(hint)}")
    return hint, None if offset is None else checked_dims(offset, "its offset")


def _range(info: Fields) -> tuple[str, int, int, tuple[str, ...]]:
    file = _text(_required(info, "relative_path", STORAGE_INFO), "its file")
    start, length = (_int64(_required(info, name, STORAGE_INFO)) for name in ("offset", "length"))
    transforms = info.get("transform_descriptors") or ()
    if not isinstance(transforms, list | tuple):
        raise Malformed("its transforms are in no list")
    return file, start, length, tuple(_text(name, "a transform") for name in transforms)


def _int64(value: object) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Malformed("its offset or length is no 64-bit integer")
    return value


class _Ranges:
    """The byte ranges, while each is being given to the entry it belongs to."""

    def __init__(self, tensors: Mapping[str, _Tensor], bytes_fqns: list[str]) -> None:
        self.file_names: list[str] = []
        self.of_bytes: dict[str, ByteRange | None] = dict.fromkeys(bytes_fqns)
        self.strays: list[tuple[str, Dims | None, ByteRange]] = []
        self._tables = {fqn: tensor.table for fqn, tensor in tensors.items()}

    def place_all(self, entries: Iterable[StorageEntry]) -> None:
        """Give each byte range to its chunk, to its bytes entry, or to the strays."""
        tables = self._tables
        numbers: dict[str, int] = {}
        for fqn, hint, offset, file, start, length, transforms in entries:
            number = numbers.get(file)
            if number is None:
                number = numbers[file] = len(numbers)
            table = tables.get(fqn)
            try:
                if table is None or offset is None:
                    self._place_other(fqn, offset, ByteRange(file, start, length, transforms))
                elif not table.place(offset, hint, number, start, length, transforms):
                    self.strays.append((fqn, offset, ByteRange(file, start, length, transforms)))
            except Malformed as wrong:
                raise Malformed(f"{shown(fqn)}: {wrong}") from None
        self.file_names.extend(numbers)

    def _place_other(self, fqn: str, offset: Dims | None, byte_range: ByteRange) -> None:
        if offset is not None or fqn not in self.of_bytes:
            self.strays.append((fqn, offset, byte_range))
        elif self.of_bytes[fqn] is None:
            self.of_bytes[fqn] = byte_range
        else:
            raise Malformed("two byte ranges for one bytes entry")


class ChunkTable:
    """The chunks of one tensor: `offsets` and `sizes` in elements, and their byte ranges."""

    __slots__ = ("_files", "_lengths", "_positions", "_starts", "_transforms", "offsets", "sizes")

    def __init__(self, offsets: Sequence[Dims], sizes: Sequence[Dims]) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self._files = array("i", [NO_FILE]) * len(offsets)
        self._starts = array("q", [0]) * len(offsets)
        self._lengths = array("q", [0]) * len(offsets)
        self._transforms: dict[int, tuple[str, ...]] = {}
        # Made when a hint is of no help, or where several chunks begin at one offset.
        self._positions: dict[Dims, int] | None = None
        if len(set(offsets)) != len(offsets):
            self._positions = self._by_offset()

    def place(
        self,
        offset: Dims,
        hint: int | None,
        file: int,
        start: int,
        length: int,
        transforms: tuple[str, ...],
    ) -> bool:
        """Give the chunk that begins at `offset` its byte range: the first, where several do.

        False where no chunk begins there. Raises `Malformed` where the chunk has a
        range already.
        """
        if (
            self._positions is None
            and hint is not None
            and 0 <= hint < len(self.offsets)
            and self.offsets[hint] == offset
        ):
            position = hint
        else:
            self._positions = self._positions or self._by_offset()
            if offset not in self._positions:
                return False
            position = self._positions[offset]
        if self._files[position] != NO_FILE:
            raise Malformed("two byte ranges for one chunk")
        self._files[position] = file
        self._starts[position] = start
        self._lengths[position] = length
        if transforms:
            self._transforms[position] = transforms
        return True

    def _by_offset(self) -> dict[Dims, int]:
        positions: dict[Dims, int] = {}
        for position, offset in enumerate(self.offsets):
            positions.setdefault(offset, position)
        return positions

    def chunks(self, n_dims: int, file_names: Sequence[str]) -> Chunks:
        """The columns, once every byte range is placed."""
        self._share_ranges()
        return Chunks(
            n_dims,
            array("q", chain.from_iterable(self.offsets)),
            array("q", chain.from_iterable(self.sizes)),
            RangeColumns(self._files, self._starts, self._lengths, file_names, self._transforms),
        )

    def _share_ranges(self) -> None:
        """Chunks at one offset have one key, and so one range: each load reads it for all."""
        if self._positions is None or len(self._positions) == len(self.offsets):
            return
        for position, offset in enumerate(self.offsets):
            first = self._positions[offset]
            self._files[position] = self._files[first]
            self._starts[position] = self._starts[first]
            self._lengths[position] = self._lengths[first]
            if first in self._transforms:
                self._transforms[position] = self._transforms[first]
