"""The decoder reads all of the metadata, or refuses it with the reason.

Real metadata of four torch versions and six frameworks, torch's own reader
beside ours, and metadata made by hand that no writer produces.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_pickles import (
    DCP,
    bytes_entry,
    called,
    chunk,
    dcp_class,
    dict_of,
    index,
    list_of,
    made,
    metadata,
    named,
    number,
    pickled,
    properties,
    size,
    storage,
    tensor,
    text,
    tuple_of,
    weight,
)

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.dcp.fast_path import fast_path_shapes
from ckptctl.formats.dcp.metadata import decode_metadata, shapes_that_pay
from ckptctl.formats.pickles.reading import Shapes
from ckptctl.model import ByteRange, Metadata


def refusal(data: bytes) -> str:
    with pytest.raises(MetadataUnreadable) as refused:
        decode_metadata(data)
    return refused.value.message


def metadata_below(folder: Path) -> Iterator[tuple[Path, Metadata]]:
    for path in sorted(folder.rglob(".metadata")):
        yield path, decode_metadata(path.read_bytes())


def test_every_older_torch_is_read_as_it_read_itself(dcp_versions):
    n_steps = 0
    for path, decoded in metadata_below(dcp_versions):
        step = path.parent
        expected = json.loads(Path(f"{step}.expected.json").read_text())["keys"]
        tensors = {fqn: entry for fqn, entry in expected.items() if entry["kind"] == "tensor"}
        assert set(decoded.tensors) == set(tensors), step
        assert set(decoded.bytes_entries) == set(expected) - set(tensors), step
        for fqn, entry in decoded.tensors.items():
            assert f"torch.{entry.dtype}" == tensors[fqn]["dtype"], (step, fqn)
            assert list(entry.shape) == tensors[fqn]["shape"], (step, fqn)
            assert len(entry.chunks) == tensors[fqn]["chunks"], (step, fqn)
        n_steps += 1
    assert n_steps == 66


def test_every_chunk_and_bytes_entry_of_real_metadata_has_its_range_in_a_file_that_is_there(
    dcp_versions, framework_roots
):
    for folder in (dcp_versions, framework_roots):
        for path, decoded in metadata_below(folder):
            ranges = [chunk.byte_range for t in decoded.tensors.values() for chunk in t.chunks]
            ranges += [entry.byte_range for entry in decoded.bytes_entries.values()]
            assert not decoded.strays, path
            assert ranges, path
            for byte_range in ranges:
                assert byte_range is not None, path
                assert byte_range.end <= (path.parent / byte_range.file).stat().st_size, path


def test_frameworks_hold_what_they_say_they_hold(framework_roots):
    n_folders = 0
    for about in framework_roots.glob("*/about.json"):
        for root in json.loads(about.read_text())["roots"].values():
            for folder, held in root["expected"]["dcp"].items():
                (path,) = about.parent.glob(f"**/{folder}/.metadata")
                decoded = decode_metadata(path.read_bytes())
                assert len(decoded.tensors) == held["tensor_count"], path
                assert len(decoded.bytes_entries) == held["bytes_object_count"], path
                for fqn, shape in held["global_shapes"].items():
                    assert list(decoded.tensors[fqn].shape) == shape, (path, fqn)
                n_folders += 1
    assert n_folders == 22


@pytest.mark.torch
def test_torch_reads_the_same_from_all_that_it_can_read(dcp_versions, framework_roots):
    from torch.distributed.checkpoint import FileSystemReader

    unread = set()
    for folder in (dcp_versions, framework_roots):
        for path, decoded in metadata_below(folder):
            try:
                theirs = FileSystemReader(path.parent).read_metadata()
            except (AttributeError, ImportError) as error:
                unread.add((path.relative_to(folder).parts[1], type(error).__name__))
                continue
            assert as_torch_says_it(theirs) == as_we_say_it(decoded), path
    # Classes that have moved, and classes of packages that are not installed.
    assert unread == {("fsspec-2", "AttributeError"), ("run", "ModuleNotFoundError")}


def as_torch_says_it(theirs) -> dict[str, object]:
    said: dict[str, object] = {}
    for fqn, entry in theirs.state_dict_metadata.items():
        if type(entry).__name__ == "BytesStorageMetadata":
            said[fqn] = None
            continue
        said[fqn] = (
            str(entry.properties.dtype),
            str(entry.properties.layout),
            tuple(entry.size),
            [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks],
        )
    ranges = {}
    for key, info in theirs.storage_data.items():
        offset = None if key.offset is None else tuple(key.offset)
        ranges[key.fqn, offset] = (info.relative_path, info.offset, info.length)
    checkpoint_id = getattr(getattr(theirs, "storage_meta", None), "checkpoint_id", None)
    return {
        "entries": said,
        "ranges": ranges,
        "paths": theirs.planner_data or {},
        "checkpoint_id": checkpoint_id and str(checkpoint_id),
        "version": getattr(theirs, "version", None),
    }


def as_we_say_it(ours: Metadata) -> dict[str, object]:
    said: dict[str, object] = dict.fromkeys(ours.bytes_entries)
    ranges = {}
    for fqn, tensor_entry in ours.tensors.items():
        said[fqn] = (
            f"torch.{tensor_entry.dtype}",
            f"torch.{tensor_entry.layout}",
            tensor_entry.shape,
            [(c.offsets, c.sizes) for c in tensor_entry.chunks],
        )
        for held in tensor_entry.chunks:
            assert held.byte_range is not None
            ranges[fqn, held.offsets] = parts_of(held.byte_range)
    for fqn, entry in ours.bytes_entries.items():
        assert entry.byte_range is not None
        ranges[fqn, None] = parts_of(entry.byte_range)
    return {
        "entries": said,
        "ranges": ranges,
        "paths": ours.planner_paths,
        "checkpoint_id": ours.checkpoint_id,
        "version": ours.version,
    }


def parts_of(byte_range: ByteRange) -> tuple[str, int, int]:
    return byte_range.file, byte_range.offset, byte_range.length


def test_zstd_records_keep_the_names_of_their_transforms(dcp_versions):
    step = dcp_versions / "torch-2.9.1" / "zstd-2" / "step_10"
    decoded = decode_metadata((step / ".metadata").read_bytes())
    transforms = {
        c.byte_range.transforms for t in decoded.tensors.values() for c in t.chunks if c.byte_range
    }
    assert transforms == {("stream.zstd/1",)}


@pytest.mark.parametrize("root", ["run_bare4", "run_fsdp4"])
def test_a_step_that_differs_from_the_one_before_decodes_as_it_does_alone(checkpoints, root):
    steps = sorted((checkpoints / root).glob("*/.metadata"), key=lambda path: path.stat().st_size)
    before, data = (path.read_bytes() for path in steps[-2:])
    assert len(before) == len(data)
    assert before != data
    ids = decode_metadata(data, shapes=fast_path_shapes)
    names = [(ids.checkpoint_id or "").rpartition("/")[2].encode(), (ids.save_id or "").encode()]
    beside = [at for name in names for at in range(data.find(name) - 4, data.find(name) + 42)]
    damaged = [*beside, *range(0, len(data), 211)]
    for at in (None, *(at for at in damaged if at < len(data))):
        changed = bytearray(data)
        if at is not None:
            changed[at] ^= 0x05
        decode_metadata(before)
        assert outcome(bytes(changed), shapes_that_pay) == outcome(bytes(changed), fast_path_shapes)


def outcome(data: bytes, shapes: Shapes) -> object:
    """All that is decoded, or the error."""
    try:
        metadata = decode_metadata(data, shapes=shapes)
    except (MetadataUnreadable, MetadataUnsafe) as error:
        return str(error)
    chunks = [
        (chunk.offsets, chunk.sizes, chunk.byte_range)
        for tensor in metadata.tensors.values()
        for chunk in tensor.chunks
    ]
    return [re.sub(r" at 0x\w+", "", repr(metadata)), chunks]


def test_a_name_that_occurs_twice_is_decoded_anew(checkpoints):
    data = (checkpoints / "run_bare4" / "step_10" / ".metadata").read_bytes()
    known = decode_metadata(data)
    fqn = next(fqn for fqn in known.tensors if len(fqn) > len("step_10"))
    named = fqn.replace(fqn[-7:], "step_10").encode()
    twice = data.replace(fqn.encode(), named)
    decode_metadata(twice)
    other = twice.replace(b"step_10", b"step_90")
    assert outcome(other, shapes_that_pay) == outcome(other, fast_path_shapes)


def test_the_digest_and_the_size_are_those_of_the_bytes():
    data = weight()
    decoded = decode_metadata(data, rank=3)
    assert decoded.digest == hashlib.sha256(data).hexdigest()
    assert decoded.n_bytes == len(data)
    assert decoded.rank == 3


def test_a_tensor_by_hand_has_all_that_was_written():
    decoded = decode_metadata(weight())
    entry = decoded.tensors["w"]
    assert (entry.dtype, entry.shape, entry.layout) == ("float32", (4, 2), "strided")
    assert (entry.path, entry.requires_grad, entry.pin_memory) == (("w",), False, False)
    (only,) = entry.chunks
    assert (only.offsets, only.sizes) == ((0, 0), (4, 2))
    assert only.byte_range == ByteRange("__0_0.distcp", 0, 1_024)
    assert decoded.file_names == ["__0_0.distcp"]


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        (b"N", None),
        (tuple_of(number(2), number(1)), (2, 1)),
        (list_of(number(2), number(1)), (2, 1)),
    ],
)
def test_properties_of_torch_2_15_have_strides_or_none(strides, expected):
    decoded = decode_metadata(weight(props=properties("bfloat16", strides)))
    assert decoded.tensors["w"].strides == expected
    assert decoded.tensors["w"].dtype == "bfloat16"


def test_a_dimensionless_tensor_of_torch_2_15_has_strides_of_no_dimension():
    nothing = size()
    data = weight(
        shape=nothing,
        offsets=nothing,
        sizes=nothing,
        offset=nothing,
        props=properties("float32", b")"),
    )
    assert decode_metadata(data).tensors["w"].strides == ()


@pytest.mark.parametrize(
    "module",
    [
        f"{DCP}._fsspec_filesystem",
        "olmo_core.distributed.checkpoint.filesystem",
        "dlrover.trainer.torch.flash_checkpoint.fsdp_engine",
    ],
)
def test_byte_ranges_of_other_writers_are_read(module):
    info = storage(text("a"), number(1), number(2), module=module)
    decoded = decode_metadata(weight(ranges=dict_of(index(text("w"), size(0, 0)), info)))
    assert decoded.tensors["w"].chunks[0].byte_range == ByteRange("a", 1, 2)


@pytest.mark.parametrize(
    ("checkpoint_id", "expected"),
    [
        (text("s3://runs/a/step_10"), "s3://runs/a/step_10"),
        (b"N", None),
        (called(named("pathlib", "PosixPath"), text("/"), text("a"), text("b")), "/a/b"),
        (called(named("pathlib", "PurePosixPath"), text("a"), text("b")), "a/b"),
        (called(named("pathlib._local", "PosixPath"), text("/a/b")), "/a/b"),
        (called(named("pathlib", "WindowsPath"), text("C:\\"), text("a"), text("b")), "C:\\a\\b"),
        (called(named("pathlib", "PosixPath")), "."),
    ],
)
def test_the_checkpoint_id_is_a_string_or_a_path(checkpoint_id, expected):
    meta = made(dcp_class("StorageMeta"), text("checkpoint_id"), checkpoint_id)
    decoded = decode_metadata(metadata(more=(text("storage_meta"), meta)))
    assert decoded.checkpoint_id == expected
    assert decoded.save_id is None


def test_ordered_dicts_stand_for_dicts_wherever_there_are_dicts():
    ordered = called(named("collections", "OrderedDict"))
    keyed = ordered + b"(" + index(text("b")) + storage(text("f"), number(0), number(9)) + b"u"
    with_attributes = ordered + b"(" + text("b") + bytes_entry() + b"u" + b"}b"
    data = pickled(
        made(
            dcp_class("Metadata"),
            text("state_dict_metadata"),
            with_attributes,
            text("planner_data"),
            ordered + text("b") + tuple_of(text("x"), number(0)) + b"s",
            text("storage_data"),
            keyed,
        )
    )
    decoded = decode_metadata(data)
    assert decoded.bytes_entries["b"].byte_range == ByteRange("f", 0, 9)
    assert decoded.bytes_entries["b"].path == ("x", 0)


def test_a_key_that_no_writer_has_is_kept_as_what_it_is():
    planner = dict_of(text("b"), tuple_of(text("x"), b"N", dict_of()))
    decoded = decode_metadata(metadata(text("b"), bytes_entry(), planner=planner))
    assert decoded.planner_paths == {"b": ("x", "None", "<dict>")}


@pytest.mark.parametrize(
    "planner",
    [b"N", list_of(dict_of(text("w"), number(1))), text("mine"), dict_of(number(3), b"\x88")],
)
def test_what_a_planner_keeps_for_itself_is_left_alone(planner):
    decoded = decode_metadata(metadata(text("b"), bytes_entry(), planner=planner))
    assert decoded.bytes_entries["b"].path == ("b",)
    assert not decoded.planner_paths


def test_attributes_that_a_framework_adds_are_left_alone():
    shapes = dict_of(text("w"), dict_of(text("nd_reformulated_orig_global_shape"), size(2, 2)))
    plan = made(
        named(f"{DCP}.planner", "SavePlan"), text("items"), list_of(), text("usable"), b"\x88"
    )
    decoded = decode_metadata(
        metadata(more=(text("mcore_data"), shapes, text("all_local_plans"), list_of(plan)))
    )
    assert not decoded.tensors


def test_metadata_of_megatron_core_0_15_is_metadata():
    cls = named("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")
    names = ("state_dict_metadata", "planner_data", "storage_data", "mcore_data")
    fields = [part for name in names for part in (text(name), b"}")]
    assert decode_metadata(pickled(made(cls, *fields))).strays == ()


def test_metadata_without_storage_data_has_no_ranges():
    decoded = decode_metadata(weight(ranges=b"N"))
    assert decoded.tensors["w"].chunks[0].byte_range is None


def two_chunks(*keys: bytes) -> bytes:
    """A tensor of two chunks, at (0,) and (2,), and byte ranges with these keys."""
    infos = [storage(text("f"), number(100 * i), number(7)) for i in range(len(keys))]
    ranges = dict_of(*(part for pair in zip(keys, infos, strict=True) for part in pair))
    boxes = [chunk(size(0), size(2)), chunk(size(2), size(2))]
    return metadata(text("w"), tensor(size(4), *boxes), ranges=ranges)


@pytest.mark.parametrize("hint", [b"N", number(0), number(1), number(-1), number(99)])
def test_a_range_is_joined_by_its_offset_and_the_index_is_only_a_hint(hint):
    decoded = decode_metadata(two_chunks(index(text("w"), size(2), hint)))
    first, second = decoded.tensors["w"].chunks
    assert first.byte_range is None
    assert second.byte_range == ByteRange("f", 0, 7)


def test_chunks_at_one_offset_share_its_range_as_each_load_looks_it_up():
    boxes = [chunk(size(0), size(0)), chunk(size(0), size(4))]
    ranges = dict_of(index(text("w"), size(0)), storage(text("f"), number(3), number(7)))
    decoded = decode_metadata(metadata(text("w"), tensor(size(4), *boxes), ranges=ranges))
    assert [c.byte_range for c in decoded.tensors["w"].chunks] == [ByteRange("f", 3, 7)] * 2


@pytest.mark.parametrize(
    "key",
    [
        index(text("nobody"), size(0)),
        index(text("nobody")),
        index(text("w"), size(1)),
        index(text("w")),
        index(text("w"), size(0, 0)),
    ],
)
def test_a_range_that_fits_no_chunk_is_a_stray(key):
    decoded = decode_metadata(two_chunks(key))
    ((_, _, byte_range),) = decoded.strays
    assert byte_range == ByteRange("f", 0, 7)


def test_a_range_with_an_offset_is_no_bytes_entry_s():
    ranges = dict_of(index(text("b"), size(0)), storage(text("f"), number(0), number(7)))
    decoded = decode_metadata(metadata(text("b"), bytes_entry(), ranges=ranges))
    assert decoded.bytes_entries["b"].byte_range is None
    assert decoded.strays == (("b", (0,), ByteRange("f", 0, 7)),)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (weight(offsets=size(0)), "tensor 'w': 2 dimensions, but a chunk of 1"),
        (weight(sizes=size(4, 2, 1)), "tensor 'w': 2 dimensions, but a chunk of 3"),
        (
            weight(shape=tuple_of(number(-4), number(2))),
            "its shape has a dimension that is no size",
        ),
        (weight(shape=tuple_of(b"\x88", number(2))), "its shape has a dimension that is no size"),
        (weight(shape=tuple_of(number(1 << 63), number(2))), "its shape has a dimension"),
        (
            weight(shape=tuple_of(*[number(1)] * 65)),
            "its shape is no tuple of at most 64 dimensions",
        ),
        (weight(shape=text("4x2")), "its shape is no tuple"),
        (weight(sizes=tuple_of(number(-1), number(2))), "a chunk has a dimension that is no size"),
        (weight(offset=tuple_of(number(-1), number(2))), "its offset has a dimension"),
        (weight(name=number(3)), "the name of an entry is a int, not a string"),
        (weight(fqn=number(3)), "the name in a key of the byte ranges is a int"),
        (weight(hint=text("0")), "its index is a str"),
        (weight(file=number(3)), "its file is a int, not a string"),
        (weight(start=text("0")), "its offset or length is no 64-bit integer"),
        (weight(length=number(1 << 63)), "its offset or length is no 64-bit integer"),
        (weight(length=b"\x88"), "its offset or length is no 64-bit integer"),
        (weight(tensor=text("w")), "a str is where a TensorStorageMetadata belongs"),
        (
            weight(tensor=tensor(size(4), in_list=b"N")),
            "its chunks are in a NoneType, not in a list",
        ),
        (weight(tensor=tensor(size(4), bytes_entry())), "a BytesStorageMetadata is where a Chunk"),
        (weight(props=bytes_entry()), "its properties are no TensorProperties"),
        (weight(props=properties("float32", b"N", b"N")), "its properties are no TensorProperties"),
        (weight(props=properties("float32", tuple_of(number(1)))), "2 dimensions, but 1 strides"),
        (weight(ranges=list_of()), "the byte ranges are in no dict"),
        (weight(ranges=dict_of(text("w"), text("f"))), "a str is where a MetadataIndex belongs"),
        (metadata(more=(text("version"), number(1))), "the version is a int, not a string"),
        (metadata(more=(text("storage_meta"), b"}")), "a dict is where a StorageMeta belongs"),
        (pickled(text("metadata")), "a str is where a Metadata belongs"),
        (pickled(made(dcp_class("Metadata"))), "a Metadata has no planner_data"),
        (pickled(dcp_class("Metadata") + b")\x81"), "a Metadata has no attributes"),
        (
            two_chunks(index(text("w"), size(2)), index(text("w"), size(2))),
            "two byte ranges for one",
        ),
    ],
)
def test_what_no_writer_can_mean_is_unreadable_and_says_why(data, why):
    assert why in refusal(data)


def test_one_key_twice_in_the_ranges_of_bytes_is_unreadable():
    info = storage(text("f"), number(0), number(7))
    ranges = dict_of(index(text("b")), info, index(text("b")), info)
    assert "two byte ranges for one bytes entry" in refusal(
        metadata(text("b"), bytes_entry(), ranges=ranges)
    )


def test_one_name_twice_among_the_entries_is_unreadable():
    data = metadata(text("b"), bytes_entry(), text("b"), bytes_entry())
    assert re.fullmatch(r"byte [\d,]+: a dict has the same key twice", refusal(data))


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (
            named("torch.serialization", "_get_layout"),
            [text("torch.spiral")],
            "a layout that torch",
        ),
        (dcp_class("_MEM_FORMAT_ENCODING"), [number(7)], "a member that its enumeration"),
        (dcp_class("Metadata"), [number(7)], "a Metadata is made of arguments"),
        (named("collections", "OrderedDict"), [list_of()], "an OrderedDict is made of arguments"),
        (named("pathlib", "PosixPath"), [number(7)], "a path is not made of a few short strings"),
        (named("torch", "Size"), [number(7)], "a torch.Size is not made of a tuple"),
    ],
)
def test_a_call_with_arguments_that_torch_never_gives_is_unreadable(function, args, why):
    message = refusal(pickled(called(function, *args)))
    assert re.match(r"byte \d+: ", message)
    assert why in message


def test_an_unknown_class_is_unsafe_and_named():
    with pytest.raises(MetadataUnsafe, match=r"asks for 'my_planner\.Metadata' at byte \d+"):
        decode_metadata(pickled(made(named("my_planner", "Metadata"))))


Break = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    "broken",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\n",
        lambda data: data + data,
        lambda data: b"\n" + data,
        lambda data: b"\0" * len(data),
        lambda data: b"{" + b" " * len(data) + b"}",
    ],
)
def test_cut_joined_and_foreign_files_are_unreadable(broken):
    refusal(broken(weight()))
