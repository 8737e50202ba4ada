"""Write `.metadata` as stock torch reads it.

A pickle of the objects that torch itself would pickle, at protocol 4, emitted opcode
by opcode: torch's classes are named, and never imported. As `pickle` does, every
object is put into the memo, so that readers that rely on the memo find them. What is in
it is the caller's; how it is read is the question of `metadata`.

Source: torch 2.13 `torch/distributed/checkpoint/metadata.py` and `filesystem.py`;
CPython 3.11 `Lib/pickle.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from struct import pack

from ckptctl.formats.archive.writing import pickled_integer
from ckptctl.model import ByteRange, BytesEntry, TensorEntry

_DCP = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_BATCH = 1000
_MEMOIZED = b"\x94"
_CALL = b"\x85\x94R\x94"  # TUPLE1, MEMOIZE, REDUCE, MEMOIZE
_VERSION = "1.0.0"

Dims = tuple[int, ...]


def metadata_bytes(
    entries: Sequence[TensorEntry | BytesEntry],
    paths: Mapping[str, tuple[str | int, ...]],
    *,
    checkpoint_id: str,
    save_id: str,
) -> bytes:
    """The content of a `.metadata` file; `paths` are the key paths before flattening.

    Time and memory are linear in the number of chunks.
    """
    memo = _MemoWriter()
    parts = [b"\x80\4", memo.new(_DCP, "Metadata"), memo.text("state_dict_metadata")]
    parts += _dict(memo, (_entry(memo, entry) for entry in entries))
    parts.append(memo.text("planner_data"))
    parts += _dict(memo, (memo.text(fqn) + _path(memo, path) for fqn, path in paths.items()))
    parts.append(memo.text("storage_data"))
    parts += _dict(memo, _storage(memo, entries))
    parts.append(memo.text("storage_meta"))
    parts.append(_storage_meta(memo, checkpoint_id, save_id))
    parts += [memo.text("version"), memo.text(_VERSION), b"ub."]
    return b"".join(parts)


class _MemoWriter:
    """Texts and names: written where they come first, and fetched where they come again."""

    def __init__(self) -> None:
        self._known: dict[object, bytes] = {}
        self.n_kept = 0

    def text(self, value: str) -> bytes:
        known = self._known.get(value)
        if known is not None:
            return known
        data = value.encode("utf-8", "surrogatepass")
        if len(data) < 256:
            return b"\x8c" + bytes((len(data),)) + data + self._keep(value)
        return b"X" + pack("<I", len(data)) + data + self._keep(value)

    def name(self, module: str, name: str) -> bytes:
        """A class or a function."""
        known = self._known.get((module, name))
        if known is not None:
            return known
        return self.text(module) + self.text(name) + b"\x93" + self._keep((module, name))

    def new(self, module: str, name: str) -> bytes:
        """An object of a class, and the beginning of its attributes."""
        named = self.name(module, name)
        self.n_kept += 2
        return named + b")\x81\x94}\x94("

    def size(self, dims: Dims) -> bytes:
        """A `torch.Size`."""
        named = self.name("torch", "Size")
        self.n_kept += 3 if dims else 2
        return named + _dims(dims) + _CALL

    def call(self, module: str, name: str, argument: str | int) -> bytes:
        """What a function gives for one argument."""
        named = self.name(module, name)
        given = self.text(argument) if isinstance(argument, str) else pickled_integer(argument)
        self.n_kept += 2
        return named + given + _CALL

    def _keep(self, key: object) -> bytes:
        number = self.n_kept
        self.n_kept += 1
        self._known[key] = b"h" + bytes((number,)) if number < 256 else b"j" + pack("<I", number)
        return _MEMOIZED


def _dict(memo: _MemoWriter, pairs: Iterable[bytes]) -> Iterator[bytes]:
    """A dict of keys and values that follow each other."""
    memo.n_kept += 1
    yield b"}" + _MEMOIZED
    rest = iter(pairs)
    while batch := b"".join(islice(rest, _BATCH)):
        yield b"(" + batch + b"u"


def _tuple(items: Sequence[bytes]) -> bytes:
    """A tuple, which is put into the memo unless it is empty."""
    if not items:
        return b")"
    if len(items) > 3:
        return b"(" + b"".join(items) + b"t" + _MEMOIZED
    return b"".join(items) + bytes((0x84 + len(items),)) + _MEMOIZED


@lru_cache(maxsize=4096)
def _dims(dims: Dims) -> bytes:
    return _tuple([pickled_integer(dim) for dim in dims])


def _entry(memo: _MemoWriter, entry: TensorEntry | BytesEntry) -> bytes:
    key = memo.text(entry.fqn)
    if isinstance(entry, BytesEntry):
        named = memo.name(_DCP, "BytesStorageMetadata")
        memo.n_kept += 1
        return key + named + b")\x81" + _MEMOIZED
    parts = [key, memo.new(_DCP, "TensorStorageMetadata")]
    parts += [memo.text("properties"), _properties(memo, entry)]
    parts += [memo.text("size"), memo.size(entry.shape), memo.text("chunks"), b"]", _MEMOIZED]
    memo.n_kept += 1
    chunks = entry.chunks
    each = (_chunk(memo, chunks.offsets_of(n), chunks.sizes_of(n)) for n in range(len(chunks)))
    while batch := b"".join(islice(each, _BATCH)):
        parts += [b"(", batch, b"e"]
    return b"".join((*parts, b"ub"))


def _chunk(memo: _MemoWriter, offsets: Dims, sizes: Dims) -> bytes:
    head = memo.new(_DCP, "ChunkStorageMetadata")
    begin = memo.text("offsets") + memo.size(offsets)
    return head + begin + memo.text("sizes") + memo.size(sizes) + b"ub"


def _properties(memo: _MemoWriter, tensor: TensorEntry) -> bytes:
    # The state of this class is a tuple.
    head = memo.name(_DCP, "TensorProperties") + b")\x81" + _MEMOIZED + b"("
    memo.n_kept += 1
    parts = [head, memo.name("torch", tensor.dtype)]
    flags = [b"\x88" if flag else b"\x89" for flag in (tensor.requires_grad, tensor.pin_memory)]
    parts += [memo.call("torch.serialization", "_get_layout", f"torch.{tensor.layout}"), flags[0]]
    parts += [memo.call(_DCP, "_MEM_FORMAT_ENCODING", tensor.memory_format), flags[1]]
    parts += [b"t", _MEMOIZED, b"b"]
    memo.n_kept += 1
    return b"".join(parts)


def _path(memo: _MemoWriter, path: tuple[str | int, ...]) -> bytes:
    made = _tuple([memo.text(p) if isinstance(p, str) else pickled_integer(p) for p in path])
    memo.n_kept += bool(path)
    return made


def _storage(memo: _MemoWriter, entries: Sequence[TensorEntry | BytesEntry]) -> Iterator[bytes]:
    for entry in entries:
        if isinstance(entry, BytesEntry):
            if entry.byte_range is not None:
                yield _key(memo, entry.fqn, b"N") + b"ub" + _info(memo, entry.byte_range)
            continue
        for number in range(len(entry.chunks)):
            byte_range = entry.chunks.byte_range_of(number)
            if byte_range is None:
                continue
            key = _key(memo, entry.fqn, pickled_integer(number))
            key += memo.text("offset") + memo.size(entry.chunks.offsets_of(number)) + b"ub"
            yield key + _info(memo, byte_range)


def _key(memo: _MemoWriter, fqn: str, index: bytes) -> bytes:
    head = memo.new(_DCP, "MetadataIndex")
    return head + memo.text("fqn") + memo.text(fqn) + memo.text("index") + index


def _info(memo: _MemoWriter, at: ByteRange) -> bytes:
    head = memo.new(_FILESYSTEM, "_StorageInfo")
    file = memo.text("relative_path") + memo.text(at.file)
    start = memo.text("offset") + pickled_integer(at.offset)
    end = memo.text("length") + pickled_integer(at.length)
    if at.transforms:
        end += memo.text("transform_descriptors") + b"]" + _MEMOIZED
        memo.n_kept += 1
        end += b"(" + b"".join(map(memo.text, at.transforms)) + b"e"
    return head + file + start + end + b"ub"


def _storage_meta(memo: _MemoWriter, checkpoint_id: str, save_id: str) -> bytes:
    parts = [memo.new(_DCP, "StorageMeta")]
    parts += [memo.text("checkpoint_id"), memo.text(checkpoint_id)]
    parts += [memo.text("save_id"), memo.text(save_id)]
    parts += [memo.text("load_id"), b"N", memo.text("modules"), b"]", _MEMOIZED, b"ub"]
    memo.n_kept += 1
    return b"".join(parts)
