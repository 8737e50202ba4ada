"""No sound checkpoint draws a fault: every real one there is, at listing and at structure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptctl.findings import Finding, Severity
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.inspection.coverage import check_part_coverage
from ckptctl.inspection.presence import check_presence, check_sizes
from ckptctl.inspection.stages import inspect_safetensors
from ckptctl.inspection.structure import n_structure_reads, read_structure
from ckptctl.model import Metadata, Part, PartFormat
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.storage.local import LocalStore


def parts_below(root: Path) -> dict[Path, list[Metadata]]:
    """Every folder with metadata of its own, decoded."""
    parts: dict[Path, list[Metadata]] = {}
    for path in sorted(root.rglob("*.metadata")):
        name = path.name.removeprefix("__").removesuffix(".metadata")
        rank = int(name) if name else None
        parts.setdefault(path.parent, []).append(decode_metadata(path.read_bytes(), rank=rank))
    return parts


def everything_found(folder: Path, metadatas: list[Metadata]) -> Iterator[Finding]:
    store = LocalStore(str(folder))
    files = store.list_tree()
    ranges = Ranges(metadatas)
    yield from check_presence(ranges, files)
    yield from check_sizes(ranges)
    yield from check_part_coverage(metadatas)
    structure = read_structure(RecordSource(store, "", ranges), files)
    assert structure.n_reads == n_structure_reads(ranges)
    yield from structure.findings


def codes_below(root: Path) -> dict[str, set[str]]:
    """The codes that are found in each folder, those without any left out."""
    found = {
        str(folder.relative_to(root)): {f.code for f in everything_found(folder, metadatas)}
        for folder, metadatas in parts_below(root).items()
    }
    return {folder: codes for folder, codes in found.items() if codes}


def test_checkpoints_of_older_torch_versions_are_sound(dcp_versions):
    assert len(parts_below(dcp_versions)) == 66
    assert codes_below(dcp_versions) == {
        # Torch 2.2 saves replicas on rank 0 alone; others, and idle threads, leave empty files.
        "torch-2.2.2/fsspec-2/step_10": {"shard.empty"},
        "torch-2.2.2/threads-2/step_10": {"shard.empty"},
        "torch-2.9.1/zstd-2/step_10": {"record.transformed"},
    }


def test_checkpoints_of_training_frameworks_are_sound(framework_roots):
    assert len(parts_below(framework_roots)) == 22
    assert codes_below(framework_roots) == {}


@pytest.mark.torch
def test_whatever_torch_writes_now_is_sound(checkpoints):
    assert len(parts_below(checkpoints)) > 20
    assert codes_below(checkpoints) == {
        "no_crc_2/step_100": {"record.no-crc"},
        "resaved_4/step_100": {"shard.orphan"},
        "safetensors_2/step_100": {"format.unsupported"},
        "threads_2/step_100": {"shard.empty"},
        "zstd_2/step_100": {"record.transformed"},
    }


@pytest.mark.torch
def test_whatever_the_hugging_face_writer_writes_is_sound(checkpoints):
    folders = {path.parent for path in checkpoints.rglob("*.safetensors")}
    assert len(folders) == 4
    for folder in folders:
        store = LocalStore(str(folder))
        part = Part("", PartFormat.SAFETENSORS, tuple(store.list_dir()))
        findings = list(inspect_safetensors(store, "", part))
        assert [f.code for f in findings] == ["format.no-checksums"]
        assert findings[0].severity is Severity.NOTE
