"""The classes and functions that metadata may name, and their stand-ins.

The closed list behind `decode_metadata`: the classes of torch's DCP where each
version of torch kept them, those of planners and writers that pickle their own,
and the values they are made of. A name that is not here does not exist for the
decoder. The objects are inert; `metadata` reads them.

Source: torch 2.1 to 2.15 `torch/distributed/checkpoint/metadata.py`,
`planner.py`, `filesystem.py`; Megatron-Core 0.10 to 0.16
`dist_checkpointing/strategies/torch.py`; OLMo-core 2 and DLRover 0.5, which
bring a `_StorageInfo` of their own. torch's Hugging Face writer pickles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptctl.formats.pickles.stubs import COMMON, Function, Grammar, Malformed, Stub

METADATA = "Metadata"
TENSOR = "TensorStorageMetadata"
BYTES = "BytesStorageMetadata"
CHUNK = "ChunkStorageMetadata"
PROPERTIES = "TensorProperties"
INDEX = "MetadataIndex"
STORAGE_META = "StorageMeta"
STORAGE_INFO = "_StorageInfo"
WRITE_ITEM = "WriteItem"
WRITE_DATA = "TensorWriteData"

_LAYOUTS = (
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "_mkldnn",
    "jagged",
)
_MEMORY_FORMATS = (0, 1, 2)
_WRITE_ITEM_TYPES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Layout:
    """A torch layout, by its name without `torch.`."""

    name: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A member of one of torch's enumerations, by its number."""

    code: int


def _class(kind: str) -> Function:
    def new(args: tuple[object, ...]) -> Stub:
        if args:
            raise Malformed(f"a {kind} is made of arguments")
        return Stub(kind)

    return Function(kind, new)


def _layout(args: tuple[object, ...]) -> Layout:
    match args:
        case (str(name),) if name.removeprefix("torch.") in _LAYOUTS:
            return Layout(name.removeprefix("torch."))
    raise Malformed("a layout that torch does not have")


def _enumeration(codes: tuple[int, ...]) -> Callable[[tuple[object, ...]], Encoded]:
    def member(args: tuple[object, ...]) -> Encoded:
        match args:
            case (int(code),) if code in codes:
                return Encoded(code)
        raise Malformed("a member that its enumeration does not have")

    return member


_DCP = "torch.distributed.checkpoint"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_memory_format = Function("memory format", _enumeration(_MEMORY_FORMATS))

GRAMMAR = Grammar(
    {
        **COMMON,
        ("torch.serialization", "_get_layout"): Function("_get_layout", _layout),
        **{
            (f"{_DCP}.metadata", kind): _class(kind)
            for kind in (METADATA, TENSOR, BYTES, CHUNK, PROPERTIES, INDEX, STORAGE_META)
        },
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _memory_format,
        # torch 2.1 and 2.2.
        (_SHARDED_TENSOR, PROPERTIES): _class(PROPERTIES),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): _memory_format,
        **{
            (module, STORAGE_INFO): _class(STORAGE_INFO)
            for module in (
                f"{_DCP}.filesystem",
                f"{_DCP}._fsspec_filesystem",
                "olmo_core.distributed.checkpoint.filesystem",
                "dlrover.trainer.torch.flash_checkpoint.fsdp_engine",
            )
        },
        # Megatron-Core keeps the plans of all ranks beside the metadata.
        (_MEGATRON, "MCoreMetadata"): _class(METADATA),
        (_MEGATRON, "MCoreSavePlan"): _class("SavePlan"),
        **{
            (f"{_DCP}.planner", kind): _class(kind)
            for kind in ("SavePlan", WRITE_ITEM, WRITE_DATA, "BytesIOWriteData")
        },
        (f"{_DCP}.planner", "WriteItemType"): Function(
            "WriteItemType", _enumeration(_WRITE_ITEM_TYPES)
        ),
        (f"{_DCP}.filesystem", "_StoragePrefix"): _class("_StoragePrefix"),
    },
    hashable=Stub,
)
