"""Pickles put together by hand, opcode by opcode, with any content.

The functions return the bytes that leave one value on the stack; `pickled` makes
a whole pickle of them. Nothing here needs torch, and nothing is looked up.
"""

from __future__ import annotations

DCP = "torch.distributed.checkpoint"


def pickled(value: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + value + b"."


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    n_bytes = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([n_bytes]) + value.to_bytes(n_bytes, "little", signed=True)


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def list_of(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dict_of(*items: bytes) -> bytes:
    """A dict of keys and values by turns."""
    return b"}(" + b"".join(items) + b"u"


def called(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + b"R"


def made(cls: bytes, *state: bytes) -> bytes:
    """An object with attributes: names and values by turns."""
    return cls + b")\x81" + dict_of(*state) + b"b"


def dcp_class(kind: str) -> bytes:
    return named(f"{DCP}.metadata", kind)


def size(*dims: int) -> bytes:
    return called(named("torch", "Size"), tuple_of(*map(number, dims)))


def properties(dtype: str = "float32", *more: bytes) -> bytes:
    encoding = called(dcp_class("_MEM_FORMAT_ENCODING"), number(0))
    layout = called(named("torch.serialization", "_get_layout"), text("torch.strided"))
    state = tuple_of(named("torch", dtype), layout, b"\x89", encoding, b"\x89", *more)
    return dcp_class("TensorProperties") + b")\x81" + state + b"b"


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return made(dcp_class("ChunkStorageMetadata"), text("offsets"), offsets, text("sizes"), sizes)


def tensor(
    shape: bytes, *chunks: bytes, props: bytes | None = None, in_list: bytes | None = None
) -> bytes:
    return made(
        dcp_class("TensorStorageMetadata"),
        text("properties"),
        properties() if props is None else props,
        text("size"),
        shape,
        text("chunks"),
        list_of(*chunks) if in_list is None else in_list,
    )


def bytes_entry() -> bytes:
    return dcp_class("BytesStorageMetadata") + b")\x81"


def index(fqn: bytes, offset: bytes | None = None, hint: bytes = b"N") -> bytes:
    where = () if offset is None else (text("offset"), offset)
    return made(dcp_class("MetadataIndex"), text("fqn"), fqn, text("index"), hint, *where)


def storage(
    file: bytes,
    offset: bytes,
    length: bytes,
    *more: bytes,
    module: str = f"{DCP}.filesystem",
) -> bytes:
    fields = (text("relative_path"), file, text("offset"), offset, text("length"), length)
    return made(named(module, "_StorageInfo"), *fields, *more)


def metadata(
    *entries: bytes,
    ranges: bytes | None = None,
    planner: bytes = b"}",
    more: tuple[bytes, ...] = (),
) -> bytes:
    """A whole `.metadata`: `entries` are names and values by turns, `ranges` is a dict."""
    return pickled(
        made(
            dcp_class("Metadata"),
            text("state_dict_metadata"),
            dict_of(*entries),
            text("planner_data"),
            planner,
            text("storage_data"),
            b"}" if ranges is None else ranges,
            *more,
        )
    )


def weight(**changes: bytes) -> bytes:
    """Metadata of one tensor `w` of 4 by 2 in one chunk; `changes` replace parts of it."""
    shape = changes.get("shape", size(4, 2))
    box = chunk(changes.get("offsets", size(0, 0)), changes.get("sizes", size(4, 2)))
    key = index(
        changes.get("fqn", text("w")), changes.get("offset", size(0, 0)), changes.get("hint", b"N")
    )
    info = storage(
        changes.get("file", text("__0_0.distcp")),
        changes.get("start", number(0)),
        changes.get("length", number(1_024)),
    )
    return metadata(
        changes.get("name", text("w")),
        changes.get("tensor", tensor(shape, box, props=changes.get("props"))),
        ranges=changes.get("ranges", dict_of(key, info)),
    )
