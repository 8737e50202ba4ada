"""Plan the files of another format that a step becomes, and list what is left out.

A step becomes safetensors, in files of bounded size with an index, or one `torch.save` file
with the nested state that was saved. `whole_files` streams the tensors; this module
produces the bytes around them. Safetensors have no checksums and cannot hold non-tensor
entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod

from ckptctl.data_classes import dataclass
from ckptctl.errors import UsageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.safetensors import NAMES, SUFFIX, header_bytes, index_bytes
from ckptctl.formats.archive.state_file import FlatArchive, Leaf, NotPlain, nested, pickled_state
from ckptctl.formats.archive.writing import strides_of
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import counted
from ckptctl.model import DTYPE_SIZES, TensorEntry
from ckptctl.records.byte_pass import OnProgress
from ckptctl.resharding.executing import Place
from ckptctl.resharding.reading import SourceFiles, read_values
from ckptctl.resharding.results import left_out
from ckptctl.resharding.sources import Source, SourceBytes, SourcePart
from ckptctl.resharding.whole_files import WholeFile, WholeTensor, write_whole
from ckptctl.resharding.writing import Budget

FILE_BYTES = 5_000_000_000
"""The default limit on the size of a safetensors file."""

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Export:
    """What an export writes, and what of the step it leaves out."""

    files: tuple[WholeFile, ...]
    beside: tuple[tuple[str, bytes], ...]
    n_values: int
    n_left_out: int
    findings: tuple[Finding, ...]

    @property
    def n_tensors(self) -> int:
        """The tensors of all files."""
        return sum(len(file.tensors) for file in self.files)

    @property
    def n_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.n_bytes for file in self.files)


def to_safetensors(
    source: Source, *, only_model: bool, strip: str, file_bytes: int | None, alone: bool
) -> Export:
    """A step as safetensors: one file, which is the target itself if `alone`.

    Raises `UsageError` for a dtype that the format lacks, and if two tensors get the same
    name.
    """
    tensors = _tensors(source, only_model=only_model, strip=strip)
    for name, one in tensors.items():
        if one.tensor.entry.dtype not in NAMES:
            dtype = one.tensor.entry.dtype
            raise UsageError(
                f"{name} is of dtype {dtype}, which safetensors do not support; a torch.save file "
                "(a target that ends in .pt) does",
                next_command="ckptctl convert --help",
            )
    limit = None if alone else (file_bytes or FILE_BYTES)
    groups: list[list[WholeTensor]] = [[]]
    n_bytes = 0
    for _, one in sorted(tensors.items()):
        if groups[-1] and limit is not None and n_bytes + one.n_bytes > limit:
            groups.append([])
            n_bytes = 0
        groups[-1].append(one)
        n_bytes += one.n_bytes
    files = [_safetensors_file(n, len(groups), group) for n, group in enumerate(groups, 1)]
    if alone:
        files = [_SafetensorsFile("", file.tensors, file.header) for file in files]
    beside: tuple[tuple[str, bytes], ...] = ()
    if len(files) > 1:
        of = {tensor.name: file.name for file in files for tensor in file.tensors}
        beside = ((_INDEX, index_bytes(of, sum(map(_elements, files)))),)
    others = [entry.fqn for part in source.parts for entry in _others(part, only_model)]
    findings = [*_files_left_out(source)]
    if others:
        named = counted(len(others), "entry", "entries")
        findings.insert(0, left_out(f"{named} that safetensors cannot hold", others))
    return Export(tuple(files), beside, 0, len(others), tuple(findings))


def to_flat(source: Source, files: dict[str, SourceFiles], *, only_model: bool) -> Export:
    """A step as one `torch.save` file: the nested state, with all plain values.

    Raises `UsageError` if key paths contradict each other, and `Damage`. Cost: one read per
    non-tensor entry.
    """
    tensors = _tensors(source, only_model=only_model, strip="")
    leaves: list[Leaf] = []
    others: list[str] = []
    for part in source.parts:
        for entry, value in read_values(files[part.path], [*_others(part, only_model)]):
            if isinstance(value, NotPlain):
                others.append(str(value))
            else:
                leaves.append(Leaf(part.paths.get(entry.fqn) or (entry.fqn,), value))
    for number, one in enumerate(tensors.values()):
        tensor = one.tensor.entry
        path = one.part.paths.get(tensor.fqn) or (tensor.fqn,)
        leaves.append(Leaf(path, _stub(tensor, str(number))))
    order = {path: n for part in source.parts for n, path in enumerate(part.paths.values())}
    try:
        state = nested(sorted(leaves, key=lambda leaf: order.get(leaf.path, len(order))))
    except NotPlain as error:
        raise UsageError(f"{source.url}: {error}") from error
    sizes = [one.n_bytes for one in tensors.values()]
    file = _FlatFile(tuple(tensors.values()), FlatArchive(pickled_state(state), sizes))
    findings = [*_files_left_out(source)]
    if others:
        named = counted(len(others), "entry", "entries")
        findings.insert(0, left_out(f"{named} whose values are not plain", others))
    return Export((file,), (), len(leaves) - len(tensors), len(others), tuple(findings))


def _stub(tensor: TensorEntry, key: str) -> TensorStub:
    shape = tensor.shape
    return TensorStub(tensor.dtype, shape, strides_of(shape), 0, key, prod(shape))


def write_export(
    source: Source,
    export: Export,
    files: dict[str, SourceFiles],
    place: Place,
    room: Budget,
    on_progress: OnProgress | None,
) -> None:
    """Write what was planned; see `write_whole`."""
    content = repr([(file.name, file.between(())) for file in export.files]) + source.url
    digests = repr([part.digests for part in source.parts])
    write_whole(
        export.files,
        dict(export.beside),
        files,
        place,
        room,
        identity=hashlib.sha256((content + digests).encode()).hexdigest()[:32],
        on_progress=on_progress,
    )


@dataclass(frozen=True, slots=True)
class _SafetensorsFile:
    """See `WholeFile`."""

    name: str
    tensors: tuple[WholeTensor, ...]
    header: bytes

    @property
    def n_bytes(self) -> int:
        """See `WholeFile`."""
        return len(self.header) + _elements(self)

    def between(self, crcs: Sequence[int]) -> bytes:
        """See `WholeFile.between`: the elements follow each other without a gap."""
        return b"" if crcs else self.header


@dataclass(frozen=True, slots=True)
class _FlatFile:
    """See `WholeFile`."""

    tensors: tuple[WholeTensor, ...]
    archive: FlatArchive
    name: str = ""

    @property
    def n_bytes(self) -> int:
        """See `WholeFile`."""
        return self.archive.n_bytes

    def between(self, crcs: Sequence[int]) -> bytes:
        """See `WholeFile.between`."""
        return self.archive.between(crcs)


def _elements(file: WholeFile) -> int:
    return sum(tensor.n_bytes for tensor in file.tensors)


def _tensors(source: Source, *, only_model: bool, strip: str) -> dict[str, WholeTensor]:
    """The selected tensors, by their names in the result."""
    tensors: dict[str, WholeTensor] = {}
    for part in source.parts:
        for tensor in part.tensors:
            if only_model and tensor.kind != "model":
                continue
            name = tensor.entry.fqn.removeprefix(strip)
            if not name or name in tensors:
                raise UsageError(
                    f"two tensors would get the name {name!r}, or one an empty name",
                    without=("--strip",) if strip else (),
                )
            tensors[name] = WholeTensor(name, part, tensor)
    if not tensors:
        raise UsageError(
            f"{source.url} holds none of the requested tensors",
            without=("--only",) if only_model else (),
        )
    return tensors


def _safetensors_file(number: int, total: int, group: Sequence[WholeTensor]) -> _SafetensorsFile:
    name = f"model-{number:05}-of-{total:05}{SUFFIX}" if total > 1 else f"model{SUFFIX}"
    # The format requires larger elements first, for alignment.
    in_order = sorted(group, key=lambda t: (-DTYPE_SIZES[t.tensor.entry.dtype], t.name))
    entries = [(t.name, t.tensor.entry.dtype, t.tensor.entry.shape, t.n_bytes) for t in in_order]
    return _SafetensorsFile(name, tuple(in_order), header_bytes(entries))


def _others(part: SourcePart, only_model: bool) -> Iterator[SourceBytes]:
    """The selected non-tensor entries."""
    return (e for e in part.bytes_entries if not only_model or e.kind == "model")


def _files_left_out(source: Source) -> Iterator[Finding]:
    """Findings for sidecars, which the other formats cannot hold."""
    held = [one.file.path for one in source.files if one.kind is not None]
    if held:
        yield left_out(f"{counted(len(held), 'file')} of train state beside the shards", held)
