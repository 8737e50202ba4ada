"""Metadata that ckptctl writes is read by torch and by ckptctl itself."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.dcp.writing import metadata_bytes
from ckptctl.model import ByteRange, BytesEntry, Chunk, Chunks, Metadata, TensorEntry


def metadata_of(checkpoints: Path, variant: str) -> bytes:
    return next((checkpoints / variant).glob("step_*/.metadata")).read_bytes()


def written_again(metadata: Metadata) -> bytes:
    return metadata_bytes(
        [*metadata.tensors.values(), *metadata.bytes_entries.values()],
        metadata.planner_paths,
        checkpoint_id=metadata.checkpoint_id or "",
        save_id=metadata.save_id or "",
    )


VARIANTS = ("run_fsdp4", "shapes_2", "dtypes_1", "tp_fsdp_2x2", "uneven_8", "ddp_2")


@pytest.mark.parametrize("variant", VARIANTS)
def test_metadata_that_is_written_again_says_the_same(checkpoints, variant):
    saved = decode_metadata(metadata_of(checkpoints, variant))
    again = decode_metadata(written_again(saved))
    assert again.bytes_entries == saved.bytes_entries
    assert again.planner_paths == saved.planner_paths
    assert (again.checkpoint_id, again.save_id) == (saved.checkpoint_id, saved.save_id)
    for fqn, tensor in saved.tensors.items():
        assert [*again.tensors[fqn].chunks] == [*tensor.chunks]
        assert replace(again.tensors[fqn], chunks=None) == replace(tensor, chunks=None)


@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_torch_reads_the_same_from_it_as_from_its_own(checkpoints, variant):
    data = metadata_of(checkpoints, variant)
    own, ours = pickle.loads(data), pickle.loads(written_again(decode_metadata(data)))
    for field in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(ours, field) == getattr(own, field)
    assert str(ours.storage_meta.checkpoint_id) == str(own.storage_meta.checkpoint_id)


@pytest.mark.parametrize("n_chunks", [0, 1, 999, 1000, 1001, 70_000])
def test_long_lists_large_numbers_and_long_names_are_written_whole(n_chunks):
    fqn = "layers." * 50 + "weight"
    chunks = [
        Chunk((n, 0), (1, 9), ByteRange(f"__{n % 7}_0.distcp", n << 33, 9)) for n in range(n_chunks)
    ]
    data = metadata_bytes(
        [
            TensorEntry(fqn, "bfloat16", (n_chunks, 9), Chunks.of(2, chunks)),
            BytesEntry("é", ByteRange("__0_0.distcp", 0, 1)),
        ],
        {fqn: ("layers", 1 << 40, -5), "é": ("é",)},
        checkpoint_id="s3://bucket/run",
        save_id="id",
    )
    read = decode_metadata(data)
    found = read.tensors[fqn].chunks
    assert len(found) == n_chunks
    for number in {0, n_chunks // 2, n_chunks - 1} if n_chunks else ():
        assert found[number] == chunks[number]
    assert read.planner_paths[fqn] == ("layers", 1 << 40, -5)


def test_what_records_went_through_is_said_of_each():
    entries = [
        BytesEntry(fqn, ByteRange("__0_0.distcp", 0, 5, ("stream.zstd/1",))) for fqn in "abc"
    ]
    data = metadata_bytes(entries, {}, checkpoint_id="x", save_id="y")
    read = decode_metadata(data).bytes_entries
    assert [entry.byte_range.transforms for entry in read.values()] == [("stream.zstd/1",)] * 3
