"""Read what files without metadata hold: train state, numbers, and tensors without their elements.

Sidecars are read whole when they are small and known to hold train state; of larger files of
`torch.save` the pickle alone, of safetensors the header. Nothing that a file names is imported or
run. A rank file states what that rank saved: of a DTensor its part, and the shape of the whole.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ckptctl.errors import CkptctlError, MetadataUnreadable, MetadataUnsafe, RecordUnreadable
from ckptctl.findings import Finding, explained
from ckptctl.formats.archive.directory import (
    Readable,
    RecordDirectory,
    View,
    parse_directory,
    read_directory,
    read_member,
    tail_needed,
    wrong_crcs,
)
from ckptctl.formats.archive.safetensors import PREFIX, SUFFIX, TORCH_NAMES, parse_header
from ckptctl.formats.bounded_json import NotJson, decode_json
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.parts import is_archive, may_be_archive
from ckptctl.formats.frameworks.state_keys import (
    Leaf,
    StateKind,
    StateMap,
    counts_steps,
    entries_of,
    kinds_in_file,
    kinds_of,
    leaves_of,
)
from ckptctl.formats.pickles.values import TensorStub, decode_shards, decode_value
from ckptctl.formatting import command_line, inside
from ckptctl.model import DTYPE_SIZES, ByteRange, FileInfo, Metadata, PartFormat, Step
from ckptctl.outside_numbers import whole_of
from ckptctl.records.reads import read_headers
from ckptctl.storage.contract import Span, Store, read_range

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenPart, OpenStep

T = TypeVar("T")

MAX_SIDECAR_BYTES = 16 * 2**20
MAX_SIDECARS = 32
MAX_DOCUMENT_BYTES = 4 * 2**20
MAX_ENDS = 4096
_TAIL = 98  # `tail_needed` needs as much
MAX_SCALAR_BYTES = 64 * 2**10
MAX_NUMBERS = 16
MAX_KEYS = 8

_HEAD = 512
"""So many zeros at the beginning are no header of a format."""

_OF_TORCH_SAVE = (".pt", ".pth", ".ckpt")
"""The ends of names that no other tool gives its files."""

_SCALARS: Mapping[str, str] = {
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint8": "B",
    "float64": "d",
    "float32": "f",
    "float16": "e",
}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A file beside the shards: its decoded content, or the finding that it is damaged.

    `content` is None for a file that was not read, or whose format is not known.
    """

    path: str
    content: object | None = None
    finding: Finding | None = None


def read_sidecars(
    store: Store, folder: str, step: Step, sidecars: Sequence[FileInfo]
) -> Iterator[Sidecar]:
    """Read the files that hold train state, as far as they are small; yield each.

    `folder` is where they are in the store.

    Of files that exist once per rank only the first is read: the others differ in
    values, not in kinds. Of these, of large files and of those of `torch.save` under other names,
    both ends are inspected, which shows one that was cut short. Cost: at most `MAX_SIDECARS`
    reads, and two small ones for each of the other files, of which `MAX_ENDS` are inspected.
    """
    held = [
        f for f in sidecars if f.kind == "file" and f.size and kind_of_file(step.layout, f.path)
    ]
    wanted = list(_worth_reading(step.layout, held))[:MAX_SIDECARS]
    spans = [Span(inside(folder, file.path), 0, file.size) for file in wanted]
    for file, (_, data) in zip(wanted, store.read_spans(spans), strict=True):
        try:
            yield Sidecar(file.path, content_of(data, file.path))
        except MetadataUnsafe as error:
            yield Sidecar(file.path, finding=unsafe_file(file.path, error.message))
        except CkptctlError as error:
            yield Sidecar(file.path, finding=_damaged(file, error.message, step.url, is_state=True))
    read = set(wanted)
    large = [file for file in sidecars if file not in read and _is_large(step.layout, file)]
    for file in large[:MAX_SIDECARS]:
        yield Sidecar(file.path, value_in_archive(store, inside(folder, file.path), file.size))
    if step.has_rank_files:
        return  # their damage is what the checks of records report
    known = {*held}
    others = [
        file
        for file in sidecars
        if file not in read
        and (file in known or (file.kind == "file" and file.size and is_archive(file.path)))
        and not file.path.endswith(".json")
    ]
    for file, why in _cut_short(store, folder, others[:MAX_ENDS]):
        is_state = file in known
        yield Sidecar(file.path, finding=_damaged(file, why, step.url, is_state=is_state))


def check_documents(
    store: Store, folder: str, needed: Collection[str], sidecars: Sequence[FileInfo]
) -> Iterator[Finding]:
    """Yield a finding for each damaged document in JSON beside the shards.

    `file.unreadable` for one that is `needed` to load the step and is empty or no JSON,
    `file.truncated` for any other that ends too early. Those that hold train state are
    `read_sidecars`'. Cost: at most `MAX_SIDECARS` reads of up to `MAX_DOCUMENT_BYTES`.
    """
    wanted = [f for f in sidecars if f.kind == "file" and f.size <= MAX_DOCUMENT_BYTES]
    wanted = [f for f in wanted if f.path.endswith(".json") and (f.size or f.path in needed)]
    wanted = wanted[:MAX_SIDECARS]
    spans = [Span(inside(folder, file.path), 0, file.size) for file in wanted]
    for file, (_, data) in zip(wanted, store.read_spans(spans), strict=True):
        is_needed = file.path in needed
        if not _is_broken(data, is_needed=is_needed):
            continue
        code, what = "file.truncated", "truncated"
        if is_needed:
            code, what = "file.unreadable", "no complete JSON document, and a load parses it"
        yield explained(
            code, file.path, f"{file.path} is {what}: writing or copying it was interrupted"
        )


def _is_broken(data: bytes, *, is_needed: bool) -> bool:
    """Whether a document in JSON was begun and not ended; one that is needed must be complete."""
    text = data.decode(errors="replace").strip()
    closing = {"{": "}", "[": "]"}.get(text[:1])
    try:
        decode_json(data, max_bytes=MAX_DOCUMENT_BYTES)
    except NotJson as error:
        if is_needed or closing is None:
            return is_needed and error.malformed
        return error.cut_short or (error.malformed and not text.endswith(closing))
    return False


def _worth_reading(layout: str, sidecars: Sequence[FileInfo]) -> Iterator[FileInfo]:
    families: set[tuple[str, ...]] = set()
    for file in sidecars:
        kind = kind_of_file(layout, file.path)
        if kind is None or file.size > MAX_SIDECAR_BYTES:
            continue
        if kind.rank is not None:
            if kind.names in families:
                continue
            families.add(kind.names)
        yield file


def _is_large(layout: str, file: FileInfo) -> bool:
    """Whether only the pickle of a file shows what it holds, and its name does not, or not all."""
    if file.kind != "file" or not file.size:
        return False
    kind = kind_of_file(layout, file.path)
    is_first = kind is None or kind.rank in (None, "0")
    return may_be_archive(file.path) and is_first and (kind is None or len(kind.names) > 1)


class FileReads:
    """The bytes of a file, each read when it is asked for, at most `limit` at once."""

    def __init__(self, store: Store, path: str, limit: int = MAX_SIDECAR_BYTES) -> None:
        self._store = store
        self._path = path
        self._limit = limit

    def get(self, start: int, end: int) -> bytes | None:
        """See `Readable.get`; None for more than the limit."""
        return None if end - start > self._limit else self.span(start, end - start)

    def span(self, start: int, n_bytes: int) -> bytes:
        """The bytes of a range, however long."""
        return read_range(self._store, self._path, start, n_bytes)


def in_archive(
    store: Store,
    path: str,
    size: int,
    decode: Callable[[RecordDirectory, FileReads], T],
    limit: int = MAX_SIDECAR_BYTES,
) -> T | None:
    """What `decode` makes of a file of `torch.save`; None where it is damaged or no archive.

    No more than `limit` bytes are read at once. Storage errors pass through. Cost: two short reads,
    and those of `decode`.
    """
    reads = FileReads(store, path, limit)
    try:
        directory, _ = read_directory(lambda n: reads.get(size - n, size) or b"", size)
        return decode(directory, reads)
    except (MetadataUnreadable, MetadataUnsafe, RecordUnreadable):
        return None


def value_in_archive(store: Store, path: str, size: int) -> object | None:
    """The value in an archive without the elements of its tensors; None where it is damaged.

    Cost: three short reads, and one for each number in a tensor at its top level.
    """
    return in_archive(store, path, size, _value_in)


def steps_counted(content: object) -> int | None:
    """The most steps that a decoded file counts at its top; None where it counts none."""
    held = content if isinstance(content, Mapping) else {}
    counts = (n for key, n in held.items() if type(n) is int and counts_steps(str(key)))
    return max(counts, default=None)


def steps_inside(store: Store, path: str, size: int) -> tuple[int | float, ...]:
    """The steps that a file of `torch.save` counts, at its top and in optimizers; sorted.

    At most `MAX_NUMBERS`; none of a file that is damaged or no archive. Cost: three short reads,
    and one for each count that is a tensor.
    """
    return tuple(sorted(_numbers_inside(store, path, size, _is_of_steps).values()))


def optimizer_steps_inside(store: Store, path: str, size: int) -> tuple[int | float, ...]:
    """The steps that the optimizers in a file of `torch.save` count. Cost: as `steps_inside`."""
    return tuple(_numbers_inside(store, path, size, _is_of_parameter).values())


def counts_inside(store: Store, path: str, size: int) -> Mapping[str, int | float]:
    """The steps, epochs and updates that a file of `torch.save` counts, by key.

    As `steps_inside`, but wherever the file counts them.
    """
    return _numbers_inside(store, path, size, _is_a_count)


def _numbers_inside(
    store: Store, path: str, size: int, is_wanted: Callable[[tuple[str, ...]], bool]
) -> Mapping[str, int | float]:
    def numbers(directory: RecordDirectory, reads: FileReads) -> dict[str, int | float | None]:
        pickle = read_member(directory, "data.pkl", reads)
        held = () if pickle is None else _numbers(decode_value(pickle), is_wanted)
        return {
            ".".join(keys): _number_of(one, directory, reads)
            if isinstance(one, TensorStub)
            else one
            for keys, one in islice(held, MAX_NUMBERS)
        }

    found = in_archive(store, path, size, numbers) or {}
    return {keys: number for keys, number in found.items() if number is not None}


def _is_of_parameter(path: tuple[str, ...]) -> bool:
    return path[-1] == "step" and "state" in path[:-1]


def _is_of_steps(path: tuple[str, ...]) -> bool:
    """Whether a number counts steps: at the top, and in the state of an optimizer."""
    return _is_of_parameter(path) or (len(path) == 1 and counts_steps(path[0]))


def _is_a_count(path: tuple[str, ...]) -> bool:
    return re.search("step|epoch|iter|update", path[-1]) is not None


def _numbers(
    value: object, is_wanted: Callable[[tuple[str, ...]], bool], keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int | float | TensorStub]]:
    """The numbers under the keys that are wanted, with those keys."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()
    else:
        items = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        path = (*keys, str(key))
        if isinstance(item, (int, float, TensorStub)) and not isinstance(item, bool):
            if is_wanted(path):
                yield path, item
        elif len(path) < MAX_KEYS:
            yield from _numbers(item, is_wanted, path)


def _cut_short(
    store: Store, folder: str, files: Sequence[FileInfo]
) -> Iterator[tuple[FileInfo, str]]:
    """The files that begin as `torch.save` writes them and do not end so, and why.

    Under the names of `torch.save` those that begin and end with zeros, too: they were never
    written. Under other names, zeros may be values.
    """
    spans = []
    for file in files:
        path, n_tail = inside(folder, file.path), min(file.size, _TAIL)
        n_head = min(file.size, _HEAD if file.path.endswith(_OF_TORCH_SAVE) else 2)
        spans += [Span(path, 0, n_head), Span(path, file.size - n_tail, n_tail)]
    ends = iter(store.read_spans(spans))
    for file, (_, head), (_, tail) in zip(files, ends, ends, strict=True):
        if file.path.endswith(_OF_TORCH_SAVE) and not (any(head) or any(tail)):
            yield file, "it begins and ends with zeros"
        if not head.startswith(b"PK"):
            continue
        try:
            tail_needed(tail, file.size)
        except RecordUnreadable as error:
            yield file, error.message


def content_of(data: bytes, path: str) -> object | None:
    """The value that a sidecar file holds; None for a format that is not ours to read.

    Raises `MetadataUnreadable` or `RecordUnreadable` for a damaged one, `MetadataUnsafe` for
    one that would run code. A class that is not known becomes opaque: train state is often an
    object of the trainer's.
    """
    if path.endswith(".json"):
        try:
            return decode_json(data, max_bytes=MAX_SIDECAR_BYTES)
        except NotJson as error:
            raise MetadataUnreadable(f"it is not JSON: {error}") from error
    if not data.startswith(b"PK"):
        return None
    directory = parse_directory(data, len(data))
    view = View(len(data), data, data)
    damaged = wrong_crcs(directory, view)
    if damaged:
        raise RecordUnreadable(f"{damaged[0]} in it does not match its checksum")
    return _value_in(directory, view)


def tensors_in_header(header: bytes) -> Mapping[str, TensorStub] | None:
    """The tensors that the header of a safetensors file names; None for a damaged one.

    `header` includes the length in front of it.
    """
    try:
        return {
            one.name: TensorStub(
                TORCH_NAMES.get(one.dtype, one.dtype), one.shape, (), 0, "", prod(one.shape)
            )
            for one in parse_header(header[PREFIX:])
        }
    except RecordUnreadable:
        return None


def _value_in(directory: RecordDirectory, view: Readable) -> object | None:
    pickle = read_member(directory, "data.pkl", view)
    if pickle is None:
        return None
    value = decode_shards(pickle)
    if value is None:
        return {}  # a file that holds nothing was read, all the same
    if not isinstance(value, Mapping):
        return value
    return {key: _without_stub(one, directory, view) for key, one in value.items()}


def _without_stub(value: object, directory: RecordDirectory, view: Readable) -> object:
    """The number in a tensor of one element; any other value as it is."""
    if not isinstance(value, TensorStub):
        return value
    number = _number_of(value, directory, view)
    return value if number is None else number


def _number_of(stub: TensorStub, directory: RecordDirectory, view: Readable) -> int | float | None:
    if any(size != 1 for size in stub.shape):
        return None
    data = read_member(directory, f"data/{stub.storage_key}", view)
    order = read_member(directory, "byteorder", view) or b"little"
    return None if data is None else scalar(stub, data, order.decode("ascii", "replace"))


def unsafe_file(path: str, why: str) -> Finding:
    """The finding for a file whose pickle would run code where it is loaded."""
    return explained(
        "file.unsafe",
        path,
        f"{path} {why}: loading it would run code. Nothing of it was run. Do not load this step "
        "with any other tool, and find out who wrote it",
    )


def _damaged(file: FileInfo, why: str, url: str, *, is_state: bool) -> Finding:
    """The finding for a damaged file; `is_state` if its name shows that it holds train state."""
    return Finding(
        "file.unreadable",
        file.path,
        f"{file.path} {'holds train state and ' if is_state else ''}is damaged: {why}",
        next_command=command_line("show", url),
    )


def read_numbers(
    store: Store, folder: str, metadata: Metadata, kinds: Mapping[str, StateKind]
) -> dict[str, int]:
    """The values of the `step` and `tokens` entries of a part, by FQN, where they are small.

    `kinds` are those of `entry_kinds`. Cost: one read for each such entry.
    """
    spans: dict[Span, str] = {}
    for fqn, kind in kinds.items():
        found = _small_range(metadata, fqn) if kind.names[0] in ("step", "tokens") else None
        if found is not None and len(spans) < MAX_NUMBERS:
            spans[Span(inside(folder, found.file), found.offset, found.length)] = fqn
    numbers = {}
    for span, record in store.read_spans(spans):
        value = number_in(record)
        number = None if value is None else whole_of(value)
        if number is not None:
            numbers[spans[span]] = number
    return numbers


def _small_range(metadata: Metadata, fqn: str) -> ByteRange | None:
    tensor = metadata.tensors.get(fqn)
    if tensor is None:
        found = metadata.bytes_entries[fqn].byte_range
    else:
        found = tensor.chunks.byte_range_of(0) if len(tensor.chunks) == 1 else None
    if found is None or found.transforms or not 0 < found.length <= MAX_SCALAR_BYTES:
        return None
    return found


def number_in(record: bytes) -> int | float | None:
    """The number that a whole record of a bytes entry or a 0-d tensor holds.

    None for a record of anything else, and for a damaged one: that is found by the
    checks, not here.
    """
    try:
        value = value_in_record(record)
    except (MetadataUnreadable, MetadataUnsafe, RecordUnreadable):
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def value_in_record(record: bytes) -> object:
    """The value in a whole record, and the number in a tensor of one element.

    Raises `MetadataUnreadable`, `MetadataUnsafe`, `RecordUnreadable`.
    """
    view = View(len(record), record, record)
    directory = parse_directory(record, len(record))
    pickle = read_member(directory, "data.pkl", view)
    return None if pickle is None else _without_stub(decode_value(pickle), directory, view)


def scalar(stub: TensorStub, data: bytes, byte_order: str) -> int | float | None:
    """The value of a tensor with one element; None for a larger one or another dtype.

    `byte_order` is `little` or `big`: that of the machine that wrote the record.
    """
    letter = _SCALARS.get(stub.dtype)
    if letter is None or any(size != 1 for size in stub.shape):
        return None
    form = (">" if byte_order == "big" else "<") + letter
    if len(data) != struct.calcsize(form):
        return None
    value: int | float = struct.unpack(form, data)[0]
    return value


MAX_PICKLE_BYTES = 64 << 20
"""The longest pickle that is read; a million entries take about as much."""

MAX_TENSORS = 200_000
"""No further file is opened once so many tensors are listed, which take about 100 MB."""


class HeldTensor(NamedTuple):
    """One tensor in the file at the path `file` below the step.

    `shape` is what the file holds; `whole` is the shape of the tensor that this is a part of,
    None where the file does not state it.
    """

    file: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None
    n_bytes: int
    kind: str


def held_tensors(
    parts: Iterable[OpenPart], mapped: StateMap = ()
) -> tuple[list[HeldTensor], list[str]]:
    """The tensors in the files of all parts without metadata, and the files not listed.

    Those are files that are damaged or whose pickle is too long, and all that follow once
    `MAX_TENSORS` are listed. Storage errors pass through. Cost: see `leaves_in`; none for a
    header that was read.
    """
    held: list[HeldTensor] = []
    unlisted: list[str] = []
    for part in parts:
        layout = part.opened.step.layout
        for path, read in _files_of(part):
            leaves = read() if len(held) < MAX_TENSORS else None
            if leaves is None:
                unlisted.append(path)
            else:
                held += _rows(path, leaves, layout, mapped)
    return held, unlisted


def _files_of(part: OpenPart) -> Iterator[tuple[str, Callable[[], list[Leaf] | None]]]:
    """The files of a part with tensors, by their paths in the step, and what reads them."""
    sizes = {file.path: file.size for file in part.part.files}
    is_of_archives = part.part.format is PartFormat.RANK_FILES
    for name in part.metadata[0].bytes_entries if is_of_archives else ():
        yield part.in_step(name), partial(leaves_in, part.store, part.in_store(name), sizes[name])
    for held in part.safetensors:
        for name, header in held.headers.items():
            yield held.in_step(name), partial(_leaves_in_header, header)


def copied_weights(opened: OpenStep, contents: Mapping[str, object]) -> frozenset[str]:
    """Those of some decoded files that count steps and hold weights of which others are the source.

    A copy of the best weights keeps the count of its own step. It has no optimizer, and all of its
    tensors are in files that count no steps, or in the metadata. Cost: none without a file of
    weights that counts steps; else the pickles of the files that are not among `contents`.
    """
    counting = {path for path, content in contents.items() if steps_counted(content) is not None}
    copies = {}
    for path in counting:
        leaves = [*leaves_of(contents[path])]
        is_optimizer = any(kind.names == ("optimizer",) for kind in kinds_of(leaves))
        if (tensors := tensor_names(leaves)) and not is_optimizer:
            copies[path] = tensors
    if not copies:
        return frozenset()
    others = [leaf for path in contents.keys() - counting for leaf in leaves_of(contents[path])]
    for part in opened.parts:
        others += (leaf for metadata in part.metadata for _, leaf in entries_of(metadata))
        for path, read in _files_of(part):
            others += [] if path in contents else read() or ()
    there = tensor_names(others)
    return frozenset(path for path, tensors in copies.items() if are_held(tensors, there))


def leaves_at(opened: OpenStep, path: str) -> Sequence[Leaf]:
    """The entries of a file of a step; none where it is not there or damaged. Cost: `leaves_in`."""
    size = opened.size_of(path)
    return (leaves_in(opened.store, opened.in_store(path), size) if size else None) or ()


def leaves_in(store: Store, path: str, size: int) -> list[Leaf] | None:
    """The entries of a file of `torch.save` or safetensors; None where it is damaged.

    Storage errors pass through. Cost: three short reads and one of the pickle, or one or two for
    a header.
    """
    if path.endswith(SUFFIX):
        headers = read_headers(store, "", [FileInfo(path, size)])
        return next((_leaves_in_header(header) for _, header in headers), None)
    return in_archive(store, path, size, _leaves_of_state, MAX_PICKLE_BYTES)


def _leaves_in_header(header: bytes) -> list[Leaf] | None:
    tensors = tensors_in_header(header)
    return None if tensors is None else [*leaves_of(tensors)]


def _leaves_of_state(directory: RecordDirectory, reads: FileReads) -> list[Leaf]:
    pickle = read_member(directory, "data.pkl", reads)
    if pickle is None:
        raise RecordUnreadable(f"it has no pickle of at most {MAX_PICKLE_BYTES:,} bytes")
    return [*leaves_of(decode_shards(pickle))]


def checksums_in(opened: OpenStep, path: str) -> object:
    """The checksums of the pickle and the tensors of a `torch.save` file; None where it has none.

    Raises `StorageError`. Cost: two short reads.
    """
    size = opened.size_of(path)
    if path.endswith(SUFFIX):
        return None
    return in_archive(opened.store, opened.in_store(path), size, _checksums)


def _checksums(directory: RecordDirectory, _: FileReads) -> object:
    # The pickle has the plain values: a rank's place in the data, its random numbers.
    state = [m for m in directory.members if m.name.startswith("data/") or m.name == "data.pkl"]
    if not (directory.has_crcs and len(state) > 1):
        return None
    return frozenset((member.name, member.size, member.crc) for member in state)


def _rows(file: str, leaves: Sequence[Leaf], layout: str, mapped: StateMap) -> Iterator[HeldTensor]:
    kinds = kinds_in_file(leaves, kind_of_file(layout, file), mapped, file)
    for leaf, kind in zip(leaves, kinds, strict=True):
        if leaf.shape is None:
            continue
        shape, whole = (leaf.shape, None) if leaf.local is None else (leaf.local, leaf.shape)
        n_bytes = prod(shape) * DTYPE_SIZES.get(leaf.dtype, 1)
        fqn = ".".join(map(str, leaf.path))
        yield HeldTensor(file, fqn, leaf.dtype, shape, whole, n_bytes, kind.names[0])


class TensorSize(msgspec.Struct):
    """The elements of one tensor in the files of a step."""

    n_files: int = 0
    n_elements: int = 0
    largest: int = 0
    n_whole: int | None = None
    """Elements of the whole tensor, where the files state it."""

    @property
    def is_part(self) -> bool:
        """The files hold parts of a tensor whose size they state."""
        return self.n_whole is not None and self.largest < self.n_whole

    @property
    def lacks_parts(self) -> bool:
        """The parts that exist are fewer elements than the whole tensor."""
        return self.n_whole is not None and self.n_elements < self.n_whole


TensorSizes = Mapping[tuple[str, str], TensorSize]
"""The sizes of tensors over the files of one kind, by FQN and kind."""


def tensors_by_kind(
    opened: OpenStep, kinds: Collection[str], kind_of: Callable[[str], str]
) -> Iterator[tuple[str, HeldTensor]]:
    """The tensors in the files of each of `kinds`, which `kind_of` gives of a path, with the kind.

    None where one of the files cannot be decoded: what is not known of every file would look
    smaller than it is. Raises `StorageError`.
    """
    tensors, unlisted = opened.tensors_in_files
    for tensor in () if unlisted else tensors:
        kind = kind_of(tensor.file)
        if kind in kinds:
            yield kind, tensor


def tensor_sizes(
    opened: OpenStep, kinds: Collection[str], kind_of: Callable[[str], str]
) -> TensorSizes:
    """The size of each tensor over the files of each of `kinds`; see `tensors_by_kind`."""
    sizes: dict[tuple[str, str], TensorSize] = defaultdict(TensorSize)
    for kind, tensor in tensors_by_kind(opened, kinds, kind_of):
        size = sizes[tensor.fqn, kind]
        n_elements = prod(tensor.shape)
        size.n_files += 1
        size.n_elements += n_elements
        size.largest = max(size.largest, n_elements)
        if tensor.whole is not None:
            size.n_whole = prod(tensor.whole)
    return sizes


def split_tensors(now: TensorSizes, then: TensorSizes) -> list[tuple[str, str]]:
    """The tensors that are split over the ranks: of more ranks each has less of them.

    A tensor that each rank holds whole shows nothing of how many there must be.
    """
    return [
        name
        for name, size in now.items()
        if (held := then.get(name)) is not None
        and (size.n_files != held.n_files and size.largest != held.largest)
    ]


TensorNames = Mapping[tuple[str, tuple[int, ...]], Collection[str]]
"""Tensors by the last word of their name and their shape, with the words before it: an average has
others in front. Empty for a name of two words, of which the first is that of the whole."""


def tensor_names(leaves: Iterable[Leaf]) -> TensorNames:
    """The tensors of several elements among the entries of files, by name and shape."""
    held: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    for leaf in leaves:
        if leaf.shape and prod(leaf.shape) > 1:
            *before, word = ".".join(map(str, leaf.path)).split(".")
            held[word, leaf.shape].add(before[-1] if len(before) > 1 else "")
    return held


def are_held(tensors: TensorNames, here: TensorNames) -> bool:
    """Whether each of some tensors is among others, under a name that ends with the same words."""
    return all(
        key in here and (not word or not {"", word}.isdisjoint(here[key]))
        for key, words in tensors.items()
        for word in words
    )
