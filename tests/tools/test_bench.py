"""The benchmarks run at a small size, and measure what they claim to."""

from __future__ import annotations

import importlib
import pickle
import pickletools
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCUMENT = REPOSITORY / "bench" / "results.md"
MARKER = re.compile(r"<!-- bench: ([a-z-]+) -->\n")
AREAS = MARKER.findall(DOCUMENT.read_text())
QUICK = ("listing", "logs", "scale")
SLOW = [pytest.param(area, marks=pytest.mark.long) for area in AREAS if area not in QUICK]


def run_bench(*arguments):
    command = [sys.executable, REPOSITORY / "bench" / "run.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_document_has_one_place_for_each_table():
    asked = run_bench("--help").stdout
    assert len(AREAS) == len(set(AREAS))
    assert ", ".join(AREAS) in " ".join(asked.split())


def test_an_unknown_area_is_an_error_that_lists_the_known_ones():
    done = run_bench("speed")
    assert done.returncode == 2
    assert ", ".join(AREAS) in " ".join(done.stderr.split())


@pytest.mark.torch
@pytest.mark.parametrize("area", [*QUICK, *SLOW])
def test_an_area_writes_its_own_table_and_no_other(area, tmp_path):
    document = tmp_path / "results.md"
    document.write_text(DOCUMENT.read_text())
    done = run_bench(
        area, "--scale", "0.005", "--rounds", "1", "--write", "--document", str(document)
    )
    assert done.returncode == 0, done.stderr
    before, after = (MARKER.split(path.read_text()) for path in (DOCUMENT, document))
    changed = [
        name for name, old, new in zip(AREAS, before[2::2], after[2::2], strict=True) if old != new
    ]
    assert changed == [area]
    text = after[after.index(area) + 1].partition("<!-- /bench -->")[0]
    condition, table = text.strip().split("\n\n")
    assert re.match(r"Measured on commit [0-9a-f]{7}.*; the machine was (idle|busy)", condition)
    head, _, *rows = table.splitlines()
    assert "ours / peer" in head
    assert rows
    assert all(row.count(" | ") == head.count(" | ") for row in rows)


@pytest.mark.torch
@pytest.mark.parametrize(("n_tensors", "n_ranks"), [(7, 4), (3, 1_001), (1_001, 2)])
def test_the_metadata_of_the_benchmarks_is_what_torch_pickles(
    monkeypatch, tmp_path, n_tensors, n_ranks
):
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    files = importlib.import_module("metadata_files")
    files.write_metadata(tmp_path, n_tensors, n_ranks)
    theirs = pickle.dumps(torch_metadata(files, tmp_path, n_tensors, n_ranks), protocol=4)
    assert opcodes((tmp_path / ".metadata").read_bytes()) == opcodes(theirs)


def opcodes(data):
    """All but the frames, which end elsewhere."""
    return [(op.name, arg) for op, arg, _ in pickletools.genops(data) if op.name != "FRAME"]


def torch_metadata(files, folder, n_tensors, n_ranks):
    """What a coordinator holds after its ranks have sent it what they wrote."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    names = [files.tensor_name(number) for number in range(n_tensors)]
    tensors = {}
    for number, name in enumerate(names):
        n_rows, *rest = files.chunk_shape(number)
        shape = torch.Size((n_rows * n_ranks, *rest))
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), shape, [])
    storage = {}
    for rank in range(n_ranks):
        start, sent = 0, []
        file = f"__{rank}_0.distcp"
        for number, name in enumerate(names):
            sizes = torch.Size(files.chunk_shape(number))
            offsets = torch.Size((rank * sizes[0], *(0 for _ in sizes[1:])))
            length = files.record_bytes(number)
            index = MetadataIndex(name, offsets, rank)
            chunk = ChunkStorageMetadata(offsets, sizes)
            sent.append((name, index, _StorageInfo(file, start, length), chunk))
            start += length
        for number, (_, index, info, chunk) in enumerate(pickle.loads(pickle.dumps(sent))):
            tensors[names[number]].chunks.append(chunk)
            storage[index] = info
    paths = {name: tuple(name.split(".")) for name in names}
    save_id = "3b0e0ac5-30fb-4bb0-9d31-b1ad1b5ec0f3"
    return Metadata(tensors, paths, storage, StorageMeta(str(folder), save_id, None, []), "1.0.0")
