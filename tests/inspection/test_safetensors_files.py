"""Folders of safetensors files, as DCP's Hugging Face writer leaves them, with one thing broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptctl.findings import Finding
from ckptctl.inspection.stages import inspect_safetensors
from ckptctl.model import Part, PartFormat
from ckptctl.storage.local import LocalStore

INDEX = "model.safetensors.index.json"


def check(folder: Path, part_path: str = "") -> list[Finding]:
    """All but the note that is always there."""
    store = LocalStore(str(folder))
    part = Part(part_path, PartFormat.SAFETENSORS, tuple(store.list_dir()))
    *findings, note = inspect_safetensors(store, "", part)
    assert note.code == "format.no-checksums"
    return findings


def told(folder: Path) -> list[tuple[str, str]]:
    return [(finding.code, finding.where) for finding in check(folder)]


def shard(folder: Path, rank: int, **boxes: tuple[list[int], np.ndarray]) -> Path:
    """The file of one rank: for each tensor where its box begins, and its elements."""
    places = {name: {"saved_offsets": at} for name, (at, _) in boxes.items()}
    path = folder / f"shard-{rank:05}-model-00001-of-00001.safetensors"
    save_file(
        {name: elements for name, (_, elements) in boxes.items()},
        path,
        {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
    )
    return path


def rows(n: int) -> np.ndarray:
    return np.zeros((n, 4), np.float32)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three ranks that hold two rows each, and a bias on the first."""
    shard(tmp_path, 1, w=([0, 0], rows(2)), b=([0], np.zeros(4, np.float32)))
    shard(tmp_path, 2, w=([2, 0], rows(2)))
    shard(tmp_path, 3, w=([4, 0], rows(2)))
    return tmp_path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Two files of whole tensors, and the index that names them."""
    save_file({"w": rows(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": rows(1)}, tmp_path / "model-00002-of-00002.safetensors")
    weights = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return tmp_path


SECOND = "shard-00002-model-00001-of-00001.safetensors"


def test_shards_that_fill_their_tensors_draw_no_finding(sharded):
    assert check(sharded) == []


def test_whole_tensors_and_their_index_draw_no_finding(whole):
    assert check(whole) == []


def test_a_lost_shard_in_the_middle_is_a_gap(sharded):
    (sharded / SECOND).unlink()
    (finding,) = check(sharded)
    assert (finding.code, finding.where) == ("coverage.gap", "w")
    assert finding.message == "8 of 24 elements are in no chunk"


def test_a_shard_that_is_there_twice_is_an_overlap(sharded):
    shard(sharded, 4, w=([4, 0], rows(2)))
    assert told(sharded) == [("coverage.overlap", "w")]


def test_the_place_of_a_finding_is_relative_to_the_step(sharded):
    (sharded / SECOND).unlink()
    assert [finding.where for finding in check(sharded, "sharded")] == ["sharded/w"]


def test_shards_that_disagree_about_a_dtype_are_a_mismatch(sharded):
    shard(sharded, 2, w=([2, 0], rows(2).astype(np.float64)))
    assert told(sharded) == [("record.mismatch", "w")]


@pytest.mark.parametrize("n_cut", [1, 31])
def test_a_file_cut_short_says_how_short(sharded, n_cut):
    path = sharded / SECOND
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-n_cut])
    (finding,) = check(sharded)
    assert (finding.code, finding.where) == ("shard.truncated", SECOND)
    assert finding.message == (f"{size - n_cut:,} of {size:,} bytes exist; 1 tensor cannot be read")


@pytest.mark.parametrize("n_bytes", [0, 7, 8, 100])
def test_a_file_cut_within_its_header_is_short(sharded, n_bytes):
    path = sharded / SECOND
    data = path.read_bytes()
    path.write_bytes(data[:n_bytes])
    needed = 8 if n_bytes < 8 else 8 + int.from_bytes(data[:8], "little")
    (finding,) = check(sharded)
    assert (finding.code, finding.where) == ("shard.truncated", SECOND)
    assert finding.message == f"its header is truncated: {n_bytes} of at least {needed} bytes"


def test_a_file_of_zeros_has_no_readable_header(sharded):
    path = sharded / SECOND
    path.write_bytes(bytes(path.stat().st_size))
    assert told(sharded) == [("record.framing", SECOND)]


def test_bytes_after_the_last_tensor_are_refused_as_every_reader_does(sharded):
    path = sharded / SECOND
    path.write_bytes(path.read_bytes() + b"junk")
    assert told(sharded) == [("record.framing", SECOND)]


def test_a_file_that_begins_with_a_pickled_entry_is_told(sharded):
    path = sharded / SECOND
    path.write_bytes(b"PK\3\4" + bytes(1_000) + path.read_bytes())
    (finding,) = check(sharded)
    assert (finding.code, finding.where) == ("record.framing", SECOND)
    assert "entries that are no tensors in front of the header" in finding.message


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path):
    names = {f"a tensor with a rather long name, number {i:05}": rows(1) for i in range(2_000)}
    save_file(names, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size > 2_000 * 100
    assert check(tmp_path) == []


def test_a_link_is_not_followed(sharded):
    path = sharded / SECOND
    path.rename(sharded / "elsewhere")
    path.symlink_to(sharded / "elsewhere")
    assert told(sharded) == [("path.escape", SECOND)]


def test_a_file_that_the_index_names_and_that_is_not_there_is_missing(whole):
    (whole / "model-00002-of-00002.safetensors").unlink()
    (finding,) = check(whole)
    assert (finding.code, finding.where) == ("shard.missing", "model-00002-of-00002.safetensors")
    assert finding.message == "1 tensor cannot be read: b"


def test_a_file_without_a_tensor_that_the_index_says_it_holds_is_a_mismatch(whole):
    save_file({"other": rows(1)}, whole / "model-00002-of-00002.safetensors")
    (finding,) = check(whole)
    assert (finding.code, finding.where) == (
        "record.mismatch",
        "model-00002-of-00002.safetensors",
    )
    assert finding.message == f"1 tensor cannot be read: b; {INDEX} assigns them to this file"


def test_an_index_that_names_a_path_outside_is_not_followed(whole):
    weights = {"w": "../../model.safetensors"}
    (whole / INDEX).write_text(json.dumps({"weight_map": weights}))
    assert told(whole) == [("path.escape", "../../model.safetensors")]


def test_a_damaged_index_is_told(whole):
    (whole / INDEX).write_bytes(b"{")
    assert told(whole) == [("record.framing", INDEX)]


def test_an_index_that_is_a_link_is_not_followed(whole):
    (whole / INDEX).unlink()
    (whole / INDEX).symlink_to("/etc/passwd")
    assert told(whole) == [("path.escape", INDEX)]


def test_an_index_beyond_all_measure_is_not_read(whole):
    with (whole / INDEX).open("r+b") as file:
        file.truncate(2**40)
    assert told(whole) == [("record.framing", INDEX)]


def test_without_an_index_the_files_count_themselves(whole):
    (whole / INDEX).unlink()
    assert check(whole) == []
    (whole / "model-00002-of-00002.safetensors").unlink()
    (finding,) = check(whole)
    assert (finding.code, finding.where) == ("shard.missing", "model-00002-of-00002.safetensors")
    assert finding.message == "1 of 2 files exist"


def test_a_tensor_in_two_files_of_whole_tensors_is_an_overlap(whole):
    save_file({"b": rows(1), "w": rows(2)}, whole / "model-00002-of-00002.safetensors")
    assert told(whole) == [("coverage.overlap", "w")]


@pytest.mark.torch
def test_each_byte_flipped_in_a_header_of_torch_is_told_or_means_the_same(checkpoints, copy_of):
    folder = copy_of(checkpoints / "hf_2/step_100")
    assert check(folder) == []
    path = next(folder.glob("shard-00002-*"))
    data = path.read_bytes()
    n_header = int.from_bytes(data[:8], "little")
    missed = []
    for at in range(8 + n_header):
        broken = bytearray(data)
        broken[at] ^= 0xFF  # no longer UTF-8, or another length
        path.write_bytes(broken)
        if not check(folder):
            missed.append(at)
    assert missed == []


def test_a_listing_that_is_older_than_the_file_is_a_storage_error(sharded):
    from ckptctl.storage.contract import ShortRead

    store = LocalStore(str(sharded))
    files = tuple(replace(file, size=file.size + 1) for file in store.list_dir())
    with pytest.raises(ShortRead):
        list(inspect_safetensors(store, "", Part("", PartFormat.SAFETENSORS, files)))
