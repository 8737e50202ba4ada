"""Is the tensor in a record the chunk that the metadata says it is?

Its pickle says dtype, shape, strides and how many elements the storage has, the
archive's directory how many bytes there are. The elements are not looked at.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.formats.archive.directory import Readable, RecordDirectory, read_member
from ckptctl.formats.values import TensorStub, decode_tensor_pickle
from ckptctl.model import DTYPE_SIZES, TensorEntry

MAX_PICKLE_BYTES = 64 << 10
"""The longest pickle that is taken for a tensor's; that of 64 dimensions has less than 2 KiB."""

# Names by which torch pickles tensors that are more than a storage, a shape and strides.
_OTHER_TENSORS = tuple(
    f"c{module}\n{name}\n".encode()
    for module, name in (
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("torch._utils", "_rebuild_nested_tensor"),
        ("torch._utils", "_rebuild_wrapper_subclass"),
        ("torch._utils", "_rebuild_meta_tensor_no_storage"),
        ("torch._tensor", "_rebuild_from_type_v2"),
    )
)


class Unfit(Exception):
    """A sound archive that does not hold what it should: `code` is the finding, `message` why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _mismatch(message: str) -> Unfit:
    return Unfit("record.mismatch", message)


def tensor_in(directory: RecordDirectory, view: Readable) -> TensorStub:
    """The tensor that a record describes; raises `Unfit` where it describes none."""
    pickle = read_member(directory, "data.pkl", view)
    if pickle is None or len(pickle) > MAX_PICKLE_BYTES:
        raise _mismatch("its pickle is too long to be that of a tensor")
    try:
        return _decoded(pickle)
    except MetadataUnreadable as error:
        raise _mismatch(f"it holds no tensor: {error.message}") from error
    except MetadataUnsafe as error:
        if any(name in pickle for name in _OTHER_TENSORS):
            raise Unfit("format.unsupported", "it is a tensor of a class of its own") from error
        raise Unfit("record.unsafe", error.message) from error


@lru_cache(maxsize=512)
def _decoded(pickle: bytes) -> TensorStub:
    # Thousands of records hold equal pickles: those of equally sharded tensors.
    return decode_tensor_pickle(pickle)


def check_tensor(
    stub: TensorStub, directory: RecordDirectory, tensor: TensorEntry, chunk: int
) -> None:
    """Raise `Unfit` where a record does not hold chunk number `chunk` of a tensor."""
    sizes = tensor.chunks.sizes_of(chunk)
    n_elements = prod(stub.shape)
    if stub.dtype != tensor.dtype:
        raise _mismatch(f"it holds {stub.dtype}, its metadata says {tensor.dtype}")
    if stub.shape != sizes and (n_elements or prod(sizes)):
        raise _mismatch(f"it holds a tensor of shape {stub.shape}, its metadata says {sizes}")
    member = directory.find(f"data/{stub.storage_key}")
    if member is None:
        raise _mismatch(f"it holds no elements: data/{stub.storage_key} is not there")
    item_size = DTYPE_SIZES.get(stub.dtype)
    n_bytes = stub.n_elements_in_storage * (item_size or 0)
    if item_size is not None and member.size != n_bytes:
        raise _mismatch(f"it holds {member.size:,} bytes of elements instead of {n_bytes:,}")
    last = stub.storage_offset
    last += sum((n - 1) * stride for n, stride in zip(stub.shape, stub.strides, strict=True))
    if n_elements and last >= stub.n_elements_in_storage:
        raise _mismatch(
            f"its last element is number {last:,} of {stub.n_elements_in_storage:,} in its storage"
        )
