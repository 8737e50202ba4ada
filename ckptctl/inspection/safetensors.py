"""Check safetensors files by their headers, and the indexes that list them.

The header of a safetensors file states bounds, offsets and shapes of its tensors. It carries
no checksums, and DCP's Hugging Face writer states neither the number of ranks nor the shape of
the whole tensor: a shard that held the end of all its tensors can be lost without a trace.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import RecordUnreadable
from ckptctl.findings import Finding, at_most_few
from ckptctl.formats.archive.safetensors import (
    INDEX_SUFFIX,
    MAX_HEADER,
    PREFIX,
    SUFFIX,
    StoredTensor,
    header_length,
    parse_header,
    parse_index,
    whole_tensor,
)
from ckptctl.formatting import counted, inside, some_of
from ckptctl.inspection.coverage import check_coverage
from ckptctl.inspection.presence import escape_reason
from ckptctl.model import FileInfo, Part

_ONE_OF_SEVERAL = re.compile(
    r"(?P<before>.*model(?:\.\w+)?)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})(?P<suffix>\.\w+)"
)

_OF_SEVERAL = re.compile(r"^shard-[0-9]+-|-[0-9]{5}-of-[0-9]{5}(?=\.\w+$)")
"""What distinguishes the files of one model."""

Headers = Mapping[str, Sequence[StoredTensor]]
"""The tensors of each file whose header is sound."""


def check_safetensors(
    part: Part, headers: Iterable[tuple[FileInfo, bytes]], indexes: Iterable[tuple[FileInfo, bytes]]
) -> Iterator[Finding]:
    """Yield the faults that the headers of a part's files and its indexes show.

    `headers` are those of its regular safetensors files, `indexes` the content of its
    index files of at most `MAX_HEADER` bytes; see `records.reads`. Yields
    `path.escape`, `record.framing`, `record.mismatch`, `shard.missing`, `shard.truncated`,
    `coverage.gap`, `coverage.overlap`, and always `format.no-checksums`.
    """
    files = [file for file in part.files if file.path.endswith(SUFFIX)]
    listed = [file for file in part.files if file.path.endswith(INDEX_SUFFIX)]
    findings: list[Finding] = []
    sound: dict[str, Sequence[StoredTensor]] = {}
    for file in files + listed:
        if file.kind != "file":
            message = "it is a link or not a regular file, and is not followed"
            findings.append(Finding("path.escape", file.path, message))
    for file, header in headers:
        parsed = _parsed(file, header)
        if isinstance(parsed, Finding):
            findings.append(parsed)
        else:
            sound[file.path] = parsed
            findings += _check_length(file, len(header), parsed)
    if len(sound) == len(files):
        for headers_of_model in _by_model(sound):
            if listed or not _are_of_ranks(headers_of_model):
                findings += _check_tensors(headers_of_model)
    for index in listed:
        if index.size > MAX_HEADER:
            message = f"an index of {index.size:,} bytes is not read"
            findings.append(Finding(RecordUnreadable.code, index.path, message))
    for index, content in indexes:
        findings += check_index(index, content, sound, {file.path for file in files})
    if not listed:
        findings += check_numbers(file.path for file in files)
    n_tensors = len({tensor.name for tensors in sound.values() for tensor in tensors})
    what = f"{counted(len(files), 'safetensors file')} with {counted(n_tensors, 'tensor')}"
    findings.append(Finding("format.no-checksums", "", f"{what}: the format has no checksums"))
    for finding in at_most_few(findings):
        where = inside(part.path, finding.where) if finding.where else part.path
        yield replace(finding, where=where)


def _parsed(file: FileInfo, header: bytes) -> Sequence[StoredTensor] | Finding:
    """The tensors of a file, or what keeps its header from being read."""
    begins_well = header[PREFIX : PREFIX + 1] in (b"", b"{")
    try:
        needed = PREFIX + header_length(header) if len(header) >= PREFIX else PREFIX
        if file.size < needed and begins_well:
            message = f"its header is truncated: {file.size:,} of at least {needed:,} bytes"
            return Finding("shard.truncated", file.path, message)
        return parse_header(header[PREFIX:])
    except RecordUnreadable as error:
        return Finding(error.code, file.path, error.message)


def _check_length(
    file: FileInfo, n_header: int, tensors: Sequence[StoredTensor]
) -> Iterator[Finding]:
    needed = n_header + sum(tensor.n_bytes for tensor in tensors)
    if file.size < needed:
        lost = [t for t in tensors if n_header + t.start + t.n_bytes > file.size]
        yield Finding(
            "shard.truncated",
            file.path,
            f"{file.size:,} of {needed:,} bytes exist; {counted(len(lost), 'tensor')} cannot "
            "be read",
        )
    elif file.size > needed:
        message = f"{file.size - needed:,} bytes belong to no tensor; no reader accepts that"
        yield Finding("record.framing", file.path, message)


def _by_model(headers: Headers) -> Iterable[Headers]:
    """The files of each model in a folder: two may have tensors of the same names.

    accelerate writes `model_1.safetensors` beside `model.safetensors`, and `save_pretrained`
    variants of one model (`model.fp16.safetensors`).
    """
    models: dict[str, dict[str, Sequence[StoredTensor]]] = defaultdict(dict)
    for path, tensors in headers.items():
        models[_OF_SEVERAL.sub("", path)][path] = tensors
    return models.values()


def _are_of_ranks(headers: Headers) -> bool:
    """Whether each file holds the same tensors, and none states where in them its slices are."""
    names = {frozenset(tensor.name for tensor in tensors) for tensors in headers.values()}
    is_placed = any(any(tensor.offsets) for tensors in headers.values() for tensor in tensors)
    return len(headers) > 1 and len(names) == 1 and not is_placed


def _check_tensors(headers: Headers) -> Iterator[Finding]:
    """Check that the slices of each tensor, from all files of a model, fill its shape."""
    slices: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensors in headers.values():
        for tensor in tensors:
            slices[tensor.name].append(tensor)
    for name, parts in slices.items():
        if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
            message = "its shards differ in dtype or in the number of dimensions"
            yield Finding("record.mismatch", name, message)
            continue
        yield from check_coverage(
            whole_tensor(name, parts[0].dtype, [(part, None) for part in parts])
        )


def check_index(
    index: FileInfo, content: bytes, headers: Headers, files: Collection[str]
) -> Iterator[Finding]:
    """Yield what an index names that is not there: files, and tensors in those with a header.

    `files` are the paths in the folder of the index. Yields `path.escape`, `record.framing`,
    `record.mismatch`, `shard.missing`, and `index.size` where all that it names is there and
    takes other bytes than it states.
    """
    try:
        named, total_size = parse_index(content)
    except RecordUnreadable as error:
        yield Finding(error.code, index.path, error.message)
        return
    held = {file: {tensor.name for tensor in tensors} for file, tensors in headers.items()}
    absent: dict[str, list[str]] = defaultdict(list)
    for name, file in named.items():
        if file not in files or (file in held and name not in held[file]):
            absent[file].append(name)
    for file, names in absent.items():
        message = f"{counted(len(names), 'tensor')} cannot be read: {some_of(names)}"
        reason = escape_reason(file)
        if reason is not None:
            yield Finding("path.escape", file, f"the path {reason}; {message}")
        elif file in files:
            yield Finding(
                "record.mismatch", file, f"{message}; {index.path} assigns them to this file"
            )
        else:
            yield Finding("shard.missing", file, message)
    if not absent and total_size is not None and held.keys() >= set(named.values()):
        in_files = sum(
            tensor.n_bytes
            for file in {*named.values()}
            for tensor in headers[file]
            if named.get(tensor.name) == file
        )
        if in_files != total_size:
            yield Finding(
                "index.size",
                index.path,
                f"{index.path} states {total_size:,} bytes of tensors, and the files that it names "
                f"hold {in_files:,}: it may belong to another save",
            )


def check_numbers(paths: Iterable[str]) -> Iterator[Finding]:
    """Yield `shard.missing` for files that others count: `model-00001-of-00003.safetensors`."""
    numbers: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for path in paths:
        match = _ONE_OF_SEVERAL.fullmatch(path)
        if match and not match["before"].startswith("shard-"):
            numbered = match["before"], int(match["total"]), match["suffix"]
            numbers[numbered].add(int(match["number"]))
    for (before, total, suffix), there in numbers.items():
        first = 0 if 0 in there else 1
        for number in sorted(set(range(first, first + total)) - there):
            name = f"{before}-{number:05}-of-{total:05}{suffix}"
            yield Finding("shard.missing", name, f"{len(there):,} of {total:,} files exist")
