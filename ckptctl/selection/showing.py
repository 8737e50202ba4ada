"""Describe the contents of a step: tensors, ranks, sizes, train state."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ckptctl.formats.frameworks.layouts import shard_rank
from ckptctl.formats.frameworks.state_keys import entry_kinds
from ckptctl.formatting import inside
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.open_step import OpenPart
from ckptctl.model import DTYPE_SIZES, Level, Metadata, TensorEntry
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.selection.results import Contents, ShardRow, TensorRow
from ckptctl.selection.verifying import open_target

if TYPE_CHECKING:
    from typing_extensions import Unpack


def show(
    step: str,
    *,
    pattern: str | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Contents:
    """List what a step holds, by its metadata and its small files.

    `step` is named as for `verify`, and the same is raised. The step is inspected at
    `listing`: what is wrong with it is in `findings`.
    """
    requirements = Requirements(pattern=pattern)
    storage = options_from(keywords, storage)
    with open_target(step, requirements, storage) as found:
        return _contents(found.inspect(requirements, Level.LISTING))


def _contents(looked: Inspection) -> Contents:
    report = looked.report
    tensors = tuple(row for part in looked.parts for row in _tensors(part))
    metadata = [one for part in looked.parts for one in part.metadata]
    by_kind: Counter[str] = Counter()
    for row in tensors:
        by_kind[row.kind] += row.n_bytes
    return Contents(
        url=report.url,
        number=report.number,
        layout=report.layout,
        exit_code=report.exit_code,
        tensors=tensors,
        bytes_entries=tuple(fqn for one in metadata for fqn in one.bytes_entries),
        shards=tuple(row for part in looked.parts for row in _shards(part)),
        state=report.state,
        world_size=report.world_size,
        n_params=sum(prod(row.shape) for row in tensors if row.kind == "model"),
        n_bytes=report.n_bytes,
        bytes_by_kind=tuple(by_kind.most_common()),
        checkpoint_id=next((one.checkpoint_id for one in metadata if one.checkpoint_id), None),
        save_id=next((one.save_id for one in metadata if one.save_id), None),
        torch_version=_torch_version(metadata[0]) if metadata else "unknown",
        findings=report.findings,
        next_command=f"ckptctl verify {shlex.quote(report.url)} --level structure",
    )


def _tensors(part: OpenPart) -> Iterator[TensorRow]:
    seen: set[str] = set()
    for metadata in part.metadata:
        kinds = entry_kinds(metadata, part.part.path)
        for fqn, entry in metadata.tensors.items():
            if fqn not in seen:
                seen.add(fqn)
                yield TensorRow(
                    fqn,
                    entry.dtype,
                    entry.shape,
                    len(entry.chunks),
                    _n_bytes(entry),
                    kinds[fqn].names[0],
                )


def _n_bytes(entry: TensorEntry) -> int:
    return prod(entry.shape) * DTYPE_SIZES.get(entry.dtype, 1)


def _shards(part: OpenPart) -> Iterator[ShardRow]:
    records = part.records_by_file
    for file in part.part.files:
        path = inside(part.part.path, file.path)
        if file.path.endswith((".distcp", ".safetensors")):
            n_records = records.get(file.path, 0)
            yield ShardRow(path, shard_rank(file.path), file.size, n_records)


def _torch_version(metadata: Metadata) -> str:
    """Which torch wrote metadata that looks like this.

    Source: `torch/distributed/checkpoint/metadata.py` of 2.1 to 2.15.
    """
    if any(entry.strides is not None for entry in metadata.tensors.values()):
        return "2.15 or newer"
    if metadata.version is not None:
        return "2.9 or newer"
    return "2.4 to 2.8" if metadata.save_id is not None else "2.1 to 2.3"
