"""Decode a `.metadata` file.

From the bytes of `.metadata`, or of a rank-local `__{rank}.metadata`, to `model.Metadata`, as
written by torch 2.1 to 2.15 and by the planners that build on it. `GRAMMAR` is the closed list of
classes and functions that metadata may name: those of torch's DCP where each version of torch kept
them, those of planners and writers that pickle their own, and the values they are made of. A name
that is not there does not exist for the decoder. `pickles` reads the pickle; here its inert objects
become columns, and each chunk gets its byte range.

torch's loader looks a byte range up by (FQN, offset); the index in the key is a hint that it may
ignore. A `ChunkTable` has the chunks while that is being answered: their slices, and the range that
each was given so far.

Whether the metadata is complete, or fits the files, is for `inspection`.

Source: torch 2.1 to 2.15 `torch/distributed/checkpoint/metadata.py`, `planner.py`,
`planner_helpers.py` (`create_read_items_for_chunk_list`), `filesystem.py`; Megatron-Core 0.10 to
0.16 `dist_checkpointing/strategies/torch.py`; OLMo-core 2 and DLRover 0.5, which bring a
`_StorageInfo` of their own. torch's Hugging Face writer pickles nothing.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, cast

from ckptctl.errors import MetadataUnreadable
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.pickles.reading import Machine, Shape, Shapes, collector_paused, read_pickle
from ckptctl.formats.pickles.stubs import (
    COMMON,
    Dtype,
    Function,
    Grammar,
    Malformed,
    Stub,
    StubRun,
    checked_dims,
    shown,
)
from ckptctl.model import (
    NO_FILE,
    ByteRange,
    BytesEntry,
    Chunks,
    Metadata,
    RangeColumns,
    TensorEntry,
)

if TYPE_CHECKING:
    from ckptctl.formats.dcp.fast_path import ChunkRun, StorageRun

Path = tuple[str | int, ...]
Dims = tuple[int, ...]
Fields = Mapping[object, object]

METADATA = "Metadata"
TENSOR = "TensorStorageMetadata"
BYTES = "BytesStorageMetadata"
CHUNK = "ChunkStorageMetadata"
PROPERTIES = "TensorProperties"
INDEX = "MetadataIndex"
STORAGE_META = "StorageMeta"
STORAGE_INFO = "_StorageInfo"
WRITE_ITEM = "WriteItem"
WRITE_DATA = "TensorWriteData"

_LAYOUTS = (
    *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"),
    *("_mkldnn", "jagged"),
)
_MEMORY_FORMATS = (0, 1, 2)
_WRITE_ITEM_TYPES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Layout:
    """A torch layout, by its name without `torch.`."""

    name: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A member of one of torch's enumerations, by its number."""

    code: int


def _class(kind: str) -> Function:
    def new(args: tuple[object, ...]) -> Stub:
        if args:
            raise Malformed(f"a {kind} is made of arguments")
        return Stub(kind)

    return Function(kind, new)


def _layout(args: tuple[object, ...]) -> Layout:
    match args:
        case (str(name),) if name.removeprefix("torch.") in _LAYOUTS:
            return Layout(name.removeprefix("torch."))
    raise Malformed("a layout that torch does not have")


def _enumeration(codes: tuple[int, ...]) -> Callable[[tuple[object, ...]], Encoded]:
    def member(args: tuple[object, ...]) -> Encoded:
        match args:
            case (int(code),) if code in codes:
                return Encoded(code)
        raise Malformed("a member that its enumeration does not have")

    return member


_DCP = "torch.distributed.checkpoint"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_memory_format = Function("memory format", _enumeration(_MEMORY_FORMATS))

GRAMMAR = Grammar(
    {
        **COMMON,
        ("torch.serialization", "_get_layout"): Function("_get_layout", _layout),
        **{
            (f"{_DCP}.metadata", kind): _class(kind)
            for kind in (METADATA, TENSOR, BYTES, CHUNK, PROPERTIES, INDEX, STORAGE_META)
        },
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _memory_format,
        # torch 2.1 and 2.2.
        (_SHARDED_TENSOR, PROPERTIES): _class(PROPERTIES),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): _memory_format,
        **{
            (module, STORAGE_INFO): _class(STORAGE_INFO)
            for module in (
                f"{_DCP}.filesystem",
                f"{_DCP}._fsspec_filesystem",
                "olmo_core.distributed.checkpoint.filesystem",
                "dlrover.trainer.torch.flash_checkpoint.fsdp_engine",
            )
        },
        # Megatron-Core keeps the plans of all ranks beside the metadata.
        (_MEGATRON, "MCoreMetadata"): _class(METADATA),
        (_MEGATRON, "MCoreSavePlan"): _class("SavePlan"),
        **{
            (f"{_DCP}.planner", kind): _class(kind)
            for kind in ("SavePlan", WRITE_ITEM, WRITE_DATA, "BytesIOWriteData")
        },
        (f"{_DCP}.planner", "WriteItemType"): Function(
            "WriteItemType", _enumeration(_WRITE_ITEM_TYPES)
        ),
        (f"{_DCP}.filesystem", "_StoragePrefix"): _class("_StoragePrefix"),
    },
    hashable=Stub,
)

Span = tuple[int, int, tuple[str, ...]]
"""Where a record begins, its length, both in bytes, and its transforms."""

NO_HINT = -1
"""The index of a key that has none."""


def packed(dims: Dims) -> bytes:
    """Integers as an array of 64-bit ones has them: those of many chunks are joined in one go."""
    return array("q", dims).tobytes()


def unpacked(dims: bytes) -> Dims:
    """The integers that were packed."""
    return tuple(array("q", dims))


class ChunkColumns:
    """The chunks of one tensor in columns, while byte ranges are given to them.

    Offsets and sizes are in elements and `packed`, `files` as in `RangeColumns`. A span of many
    chunks is one object.
    """

    __slots__ = ("by_offset", "files", "offsets", "sizes", "spans")

    def __init__(self, offsets: list[bytes], sizes: list[bytes]) -> None:
        n_chunks = len(offsets)
        self.offsets = offsets
        # One, where all chunks have the same.
        self.sizes = sizes[:1] if sizes[:1] * n_chunks == sizes else sizes
        self.files = [NO_FILE] * n_chunks
        self.spans: list[Span] = [(0, 0, ())] * n_chunks
        # Made when a hint is of no help, or where several chunks begin at one offset.
        self.by_offset: dict[bytes, int] = {}
        if len(set(offsets)) != n_chunks:
            self._index()

    def _index(self) -> None:
        """The first chunk at each offset."""
        for position, offset in enumerate(self.offsets):
            self.by_offset.setdefault(offset, position)

    def place(self, hint: int, offset: bytes, file: int, span: Span) -> bool:
        """Give the chunk that begins at `offset` its byte range: the first, where several do.

        False where no chunk begins there. Raises `Malformed` where the chunk has a
        range already.
        """
        position = NO_HINT if self.by_offset else hint
        if not 0 <= position < len(self.offsets) or self.offsets[position] != offset:
            if not self.by_offset:
                self._index()
            if offset not in self.by_offset:
                return False
            position = self.by_offset[offset]
        if self.files[position] != NO_FILE:
            raise Malformed("two byte ranges for one chunk")
        self.files[position], self.spans[position] = file, span
        return True

    def chunks(self, n_dims: int, file_names: Sequence[str]) -> Chunks:
        """The chunks, once every byte range is placed."""
        n_chunks = len(self.offsets)
        if len(self.by_offset) not in (0, n_chunks):
            # Chunks at one offset have one key, and so one range: each load reads it for all.
            for position, offset in enumerate(self.offsets):
                first = self.by_offset[offset]
                self.files[position], self.spans[position] = self.files[first], self.spans[first]
        starts, lengths, transforms = zip(*self.spans, strict=True) if n_chunks else ((), (), ())
        return Chunks(
            n_dims,
            array("q", b"".join(self.offsets)),
            array("q", b"".join(self.sizes)) * (n_chunks // max(1, len(self.sizes))),
            RangeColumns(
                array("i", self.files),
                array("q", starts),
                array("q", lengths),
                file_names,
                {position: names for position, names in enumerate(transforms) if names},
            ),
        )


class ChunkTable:
    """The chunks of all tensors by FQN.

    `numbers` are those of the files, in the order in which they are first named.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, ChunkColumns] = {}
        self.numbers: defaultdict[str, int] = defaultdict()
        self.numbers.default_factory = self.numbers.__len__

    def place_run(self, run: StorageRun) -> list[int]:
        """Give the chunks of a run their byte ranges; the rows whose hint does not lead to one."""
        tensors, others = self.tensors, []
        numbers = map(self.numbers.__getitem__, run.files)
        rows = zip(run.fqns, run.keys, numbers, run.spans, strict=True)
        for row, (fqn, (hint, offset, _), number, span) in enumerate(rows):
            try:
                columns = tensors[fqn]
                fits = columns.offsets[hint] == offset
            except (KeyError, IndexError):
                fits = False
            if not fits or columns.by_offset or columns.files[hint] != NO_FILE:
                others.append(row)
                continue
            columns.files[hint], columns.spans[hint] = number, span
        return others


SMALL = 1 << 17
"""Smaller metadata (bytes) is read before its shapes are imported and compiled, in 16 ms."""


def shapes_that_pay(machine: Machine) -> Mapping[str, Shape]:
    """The shapes of metadata, none for small metadata."""
    if machine.end < SMALL:
        return {}
    from ckptctl.formats.dcp.fast_path import fast_path_shapes

    return fast_path_shapes(machine)


def decode_metadata(
    data: bytes, *, rank: int | None = None, shapes: Shapes | None = shapes_that_pay
) -> Metadata:
    """The metadata in `data`; `rank` is that of a rank-local file.

    `shapes` is for tests: without it the answer is the same and takes longer.

    Raises `MetadataUnsafe` when it names anything but metadata's types, and
    `MetadataUnreadable` when it is damaged or holds what no writer writes.
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
        _LAST[:] = [_CachedMetadata(data, metadata)]
    return metadata


_MOST_KEPT = 8 << 20
"""Larger metadata (bytes) is not kept until the next is decoded."""

_ID = re.compile(r"(?!\.+$)[\w.=-]+", re.ASCII)
"""A name of a folder, or an id, that a path is not changed by."""


class _CachedMetadata:
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
            self.metadata, checkpoint_id=checkpoint_id, save_id=save_id, digest=sha256_of(data)
        )


_LAST: list[_CachedMetadata] = []
"""What was decoded last: inspection goes through the steps of a run one by one."""


def _metadata(fields: Fields, data: bytes, rank: int | None) -> Metadata:
    paths = _planner_paths(_required(fields, "planner_data", METADATA))
    table = ChunkTable()
    tensors, bytes_fqns = _entries(_required(fields, "state_dict_metadata", METADATA), table)
    ranges = _RangeAssignment(table, bytes_fqns)
    ranges.place_all(_required(fields, "storage_data", METADATA))
    file_names = list(table.numbers)
    storage_meta = _storage_meta(fields.get("storage_meta"))
    return Metadata(
        tensors={
            fqn: replace(
                tensor,
                path=paths.get(fqn, (fqn,)),
                chunks=table.tensors.pop(fqn).chunks(len(tensor.shape), file_names),
            )
            for fqn, tensor in tensors.items()
        },
        bytes_entries={
            fqn: BytesEntry(fqn, byte_range, paths.get(fqn, (fqn,)))
            for fqn, byte_range in ranges.of_bytes.items()
        },
        file_names=file_names,
        strays=tuple(ranges.strays),
        planner_paths=paths,
        checkpoint_id=storage_meta.get("checkpoint_id"),
        save_id=storage_meta.get("save_id"),
        version=_text_or_none(fields.get("version"), "the version"),
        rank=rank,
        n_bytes=len(data),
        digest=sha256_of(data),
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
        fqn: tuple(map(_key, path))
        for fqn, path in planner_data.items()
        if isinstance(fqn, str) and isinstance(path, tuple)
    }


def _key(part: object) -> str | int:
    """A key as torch has it in a name; what no dict of a writer has as a key by its kind."""
    if type(part) in (str, int):
        return cast("str | int", part)
    return str(part) if part is None or type(part) in (bool, float) else f"<{_kind_of(part)}>"


_IN_TABLE = Chunks.of(0, [])
"""What a tensor has for chunks until they are taken out of the table."""


def _entries(state_dict: object, table: ChunkTable) -> tuple[dict[str, TensorEntry], list[str]]:
    """The tensors by FQN, their chunks in the table alone, and the FQNs of the bytes entries."""
    if not isinstance(state_dict, dict):
        raise Malformed("the entries of the state dict are in no dict")
    tensors: dict[str, TensorEntry] = {}
    bytes_fqns: list[str] = []
    for fqn, value in _drained(state_dict):
        fqn = _text(fqn, "the name of an entry")
        if isinstance(value, Stub) and value.kind == BYTES:
            bytes_fqns.append(fqn)
            continue
        try:
            fields = _fields(value, TENSOR)
            tensors[fqn] = _tensor(fqn, fields)
            table.tensors[fqn] = ChunkColumns(*_slices(tensors[fqn].shape, fields))
        except Malformed as wrong:
            raise Malformed(f"tensor {shown(fqn)}: {wrong}") from None
    return tensors, bytes_fqns


def _drained(items: dict[object, object]) -> Iterator[tuple[object, object]]:
    """The items in order, each removed: millions of chunks are in memory in one form at a time."""
    left = list(items.items())
    items.clear()
    left.reverse()
    while left:
        yield left.pop()


def _tensor(fqn: str, fields: Fields) -> TensorEntry:
    shape = checked_dims(_required(fields, "size", TENSOR), "its shape")
    if prod(shape) >= 1 << 63:
        raise Malformed("its shape has more elements than any tensor")
    properties = _properties(_required(fields, "properties", TENSOR))
    dtype, layout, requires_grad, memory_format, pin_memory, strides = properties
    if strides is not None and len(strides) != len(shape):
        raise Malformed(f"{len(shape)} dimensions, but {len(strides)} strides")
    return TensorEntry(
        fqn,
        dtype,
        shape,
        _IN_TABLE,
        (fqn,),
        layout,
        requires_grad,
        memory_format,
        pin_memory,
        strides,
    )


def _slices(shape: Dims, fields: Fields) -> tuple[list[bytes], list[bytes]]:
    """Where the chunks of a tensor begin, and their sizes, both `packed`."""
    chunks = _required(fields, "chunks", TENSOR)
    if not isinstance(chunks, list | tuple):
        raise Malformed(f"its chunks are in a {_kind_of(chunks)}, not in a list")
    offsets: list[bytes] = []
    sizes: list[bytes] = []
    for chunk in chunks:
        if isinstance(chunk, StubRun) and chunk.kind == CHUNK:
            these, their_sizes, _ = zip(*cast("ChunkRun", chunk).slices, strict=True)
            for n_bytes in {*map(len, these), *map(len, their_sizes)}:
                _check_n_dims(shape, n_bytes // 8)
            offsets += these
            sizes += their_sizes
            continue
        part = _fields(chunk, CHUNK)
        offsets.append(_dims_like(shape, _required(part, "offsets", CHUNK)))
        sizes.append(_dims_like(shape, _required(part, "sizes", CHUNK)))
    return offsets, sizes


def _dims_like(shape: Dims, value: object) -> bytes:
    dims = checked_dims(value, "a chunk")
    _check_n_dims(shape, len(dims))
    return packed(dims)


def _check_n_dims(shape: Dims, n_dims: int) -> None:
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


def _storage_entry(key: object, value: object) -> tuple[str, int, bytes | None, str, Span]:
    """FQN, hint, `packed` offset of the chunk, file and place in it of one byte range."""
    index, info = _fields(key, INDEX), _fields(value, STORAGE_INFO)
    fqn = _text(_required(index, "fqn", INDEX), "the name in a key of the byte ranges")
    try:
        hint, offset = _required(index, "index", INDEX), index.get("offset")
        hint = NO_HINT if hint is None else hint
        if type(hint) is not int:
            raise Malformed(f"its index is a {_kind_of(hint)}")
        offset = None if offset is None else packed(checked_dims(offset, "its offset"))
        file = _text(_required(info, "relative_path", STORAGE_INFO), "its file")
        start, length = (
            _int64(_required(info, name, STORAGE_INFO)) for name in ("offset", "length")
        )
        transforms = info.get("transform_descriptors") or ()
        if not isinstance(transforms, list | tuple):
            raise Malformed("its transforms are in no list")
        names = tuple(_text(name, "a transform") for name in transforms)
        return fqn, hint, offset, file, (start, length, names)
    except Malformed as wrong:
        raise Malformed(f"a byte range of {shown(fqn)}: {wrong}") from None


def _int64(value: object) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise Malformed("its offset or length is no 64-bit integer")
    return value


class _RangeAssignment:
    """The byte ranges, while each is being given to the entry it belongs to."""

    def __init__(self, table: ChunkTable, bytes_fqns: list[str]) -> None:
        self.of_bytes: dict[str, ByteRange | None] = dict.fromkeys(bytes_fqns)
        self.strays: list[tuple[str, Dims | None, ByteRange]] = []
        self._table = table

    def place_all(self, storage_data: object) -> None:
        """Give each byte range to its chunk, to its bytes entry, or to the strays."""
        if storage_data is None:
            return
        if not isinstance(storage_data, dict):
            raise Malformed("the byte ranges are in no dict")
        for key, value in _drained(storage_data):
            if not isinstance(key, StubRun) or key.kind != INDEX:
                self._place(*_storage_entry(key, value))
                continue
            run = cast("StorageRun", key)
            for row in self._table.place_run(run):
                hint, offset, _ = run.keys[row]
                self._place(run.fqns[row], hint, offset, run.files[row], run.spans[row])

    def _place(self, fqn: str, hint: int, offset: bytes | None, file: str, span: Span) -> None:
        number, columns = self._table.numbers[file], self._table.tensors.get(fqn)
        try:
            if offset is None and fqn in self.of_bytes:
                if self.of_bytes[fqn] is not None:
                    raise Malformed("two byte ranges for one bytes entry")
                self.of_bytes[fqn] = ByteRange(file, *span)
            elif not (columns and offset is not None and columns.place(hint, offset, number, span)):
                place = None if offset is None else unpacked(offset)
                self.strays.append((fqn, place, ByteRange(file, *span)))
        except Malformed as wrong:
            raise Malformed(f"{shown(fqn)}: {wrong}") from None
