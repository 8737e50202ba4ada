"""Read the shards of verl (FSDP) and DeepSpeed ZeRO as the source of a step.

The pickles are decoded without running them. verl saves each rank's part of a DTensor with
its placement; DeepSpeed saves flat partitions of all parameters, and their shapes in the
model states. Both become chunks of whole tensors, whose elements stay where they are.

- verl: `model.NAME`, and the optimizer's entries under the keys of its state dict.
- DeepSpeed: `model.NAME` are the optimizer's fp32 weights, from which training continues, with
  buffers and frozen parameters as saved; `optimizer.state.NAME.KEY` are its moments.

Source: verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`; DeepSpeed 0.19.8
`utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckptctl.errors import UsageError
from ckptctl.formats.archive.state_file import NotPlain
from ckptctl.formats.families import CONVERSIONS
from ckptctl.formats.frameworks.file_names import axes_in, kind_of_file, rank_file
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.values import SUBCLASS, ShardStub, TensorStub, decode_shards
from ckptctl.inspection.inspecting import Inspection
from ckptctl.model import DTYPE_SIZES, ByteRange, TensorEntry
from ckptctl.records.slices import TensorSlice, row_major
from ckptctl.resharding.flat_files import OpenFlat, open_flat, storage_of
from ckptctl.resharding.reading import Opened, SourceFiles, opened_at
from ckptctl.resharding.sources import (
    SourceChunk,
    SourcePart,
    SourceTensor,
    part_of,
    tensor_entry,
)
from ckptctl.storage.contract import Store


class ShardSource(NamedTuple):
    """The tensors of one folder of shards, and their elements."""

    part: SourcePart
    files: SourceFiles


class _Piece(NamedTuple):
    """Elements of a tensor in row-major order: from element `at` of a view of a storage."""

    elements: TensorSlice
    file: OpenFlat
    stub: TensorStub
    at: int = 0


class _Tensor(NamedTuple):
    path: tuple[str, ...]
    shape: tuple[int, ...]
    pieces: Sequence[_Piece]


class _Uneven(Exception):
    """The shards do not make up whole tensors; the message states where."""


_Place = tuple[int, ...]
_Files = Mapping[str, Mapping[_Place, OpenFlat]]


def can_be_read(inspected: Inspection) -> bool:
    """Whether a step holds shards that `read_shards` puts together."""
    grids = (grid for part in inspected.step.parts for grid in part.grids)
    return any(grid.framework in _READERS for grid in grids)


def read_shards(inspected: Inspection, store: Store) -> tuple[ShardSource, ...]:
    """The tensors of each folder of shards in a step.

    Raises `SourceDamaged` for a damaged file, and `UsageError`, with the framework's own command,
    for shards that are cut in a way that is not read here. Cost: three short reads for each
    file, and two for each storage.
    """
    step = inspected.step
    folders: dict[tuple[str, str], dict[str, dict[_Place, OpenFlat]]] = {}
    for file in step.files:
        found = rank_file(file.path, step.layout)
        if found is None or found[0].grid not in _READERS or found[0].what not in _WANTED:
            continue
        row, match = found
        place = tuple(n for axis, n in axes_in(match).items() if not axis.startswith("of_"))
        held = folders.setdefault((row.grid, match["folder"]), {}).setdefault(row.what, {})
        there = file.at(inspected.opened.in_store(file.path))
        held[place] = open_flat(store, there, step.url, decode_shards)
    sources = []
    for (grid, folder), files in sorted(folders.items()):
        in_order = {what: dict(sorted(held.items())) for what, held in files.items()}
        try:
            tensors = list(_READERS[grid](in_order))
            source = _source(store, step.url, folder.rstrip("/"), tensors)
        except (_Uneven, NotPlain) as error:
            raise UsageError(
                f"{step.url}: {error}", next_command=_other_way(step.url, grid)
            ) from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{step.url}: its files do not have the entries that {grid} writes ({error!r})",
                next_command=_other_way(step.url, grid),
            ) from error
        sources.append(source)
    return tuple(sources)


def left_beside(inspected: Inspection) -> tuple[str, ...]:
    """The files of train state that a conversion leaves out: RNG, schedulers, data loaders."""
    step = inspected.step
    found = [(file.path, rank_file(file.path, step.layout)) for file in step.files]
    return tuple(
        path
        for path, row in found
        if kind_of_file(step.layout, path) and not (row and row[0].what in _WANTED)
    )


_WANTED = ("model", "optimizer", "sharded model")


def _other_way(url: str, grid: str) -> str:
    return CONVERSIONS[grid].format(step=url, root=url.rpartition("/")[0])


# verl: each rank's part of each DTensor


def _verl(files: _Files) -> Iterator[_Tensor]:
    for what in ("model", "optimizer"):
        held: dict[tuple[str, ...], list[tuple[OpenFlat, TensorStub | ShardStub]]]
        held = defaultdict(list)
        for file in files.get(what, {}).values():
            for path, stub in _stubs((what,), file.state):
                held[path].append((file, stub))
        for path, parts in held.items():
            yield _of_ranks(path, parts)


def _stubs(
    path: tuple[str, ...], value: object
) -> Iterator[tuple[tuple[str, ...], TensorStub | ShardStub]]:
    if isinstance(value, TensorStub | ShardStub):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _stubs((*path, str(key)), item)
    elif isinstance(value, Opaque) and value.name == SUBCLASS:
        raise _Uneven(f"{'.'.join(path)} is {SUBCLASS}")


def _of_ranks(
    path: tuple[str, ...], parts: Sequence[tuple[OpenFlat, TensorStub | ShardStub]]
) -> _Tensor:
    file, first = parts[0]
    name = ".".join(path)
    if isinstance(first, TensorStub):
        return _whole(path, file, first)
    axes = [axis for axis, dim in enumerate(first.dims) if dim is not None]
    if not first.is_plain or len(axes) > 1:
        raise _Uneven(f"{name} is cut along several dimensions of the mesh")
    if not axes:
        return _whole(path, file, first.local)
    (axis,) = axes
    dim = first.dims[axis] or 0
    by_place: dict[int, tuple[OpenFlat, TensorStub]] = {}
    for file, part in parts:
        if not isinstance(part, ShardStub) or part[1:3] != first[1:3]:
            raise _Uneven(f"the ranks disagree about {name}")
        by_place.setdefault(part.coordinate[axis], (file, part.local))
    at, pieces = 0, []
    for _, (file, local) in sorted(by_place.items()):
        offsets = tuple(at if n == dim else 0 for n in range(len(first.shape)))
        pieces.append(_Piece(TensorSlice(offsets, local.shape), file, local))
        at += local.shape[dim]
    if at != first.shape[dim]:
        raise _Uneven(f"the shards of {name} have {at:,} of {first.shape[dim]:,} rows")
    return _Tensor(path, first.shape, pieces)


def _whole(path: tuple[str, ...], file: OpenFlat, stub: TensorStub) -> _Tensor:
    return _Tensor(path, stub.shape, [_Piece(TensorSlice.whole(stub.shape), file, stub)])


# DeepSpeed: flat partitions of all parameters


def _deepspeed(files: _Files) -> Iterator[_Tensor]:
    weights: dict[str, _Tensor] = {}
    for tensor in _partitioned(files):
        if tensor.path[0] == "model":
            weights[tensor.path[1]] = tensor
        yield tensor
    first = next(iter((files.get("sharded model") or files["model"]).values()))
    for alias, name in (first.state.get("shared_params") or {}).items():
        if alias not in weights and name in weights:
            yield weights[name]._replace(path=("model", alias))


def _partitioned(files: _Files) -> Iterator[_Tensor]:
    ranks = files.get("optimizer", {})
    models = list((files.get("sharded model") or files.get("model") or {}).values())
    if not models or not ranks or len({place[-1] for place in ranks}) > 1:
        raise _Uneven("the shards are those of several model-parallel ranks, or lack a kind")
    held: list[Any] = [file.state["optimizer_state_dict"] for file in ranks.values()]
    is_stage_3 = "fp32_flat_groups" in held[0]
    weights = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
    moments = "optimizer_state_dict" if is_stage_3 else "base_optimizer_state"
    cut = _cut_each if is_stage_3 else _cut_all
    for number, shapes in enumerate(models[0].state["param_shapes"]):
        paddings = [0] * len(shapes)
        if not is_stage_3 and held[0].get("param_alignment_paddings"):
            paddings = held[0]["param_alignment_paddings"][number]
        parts = [one[weights][number] for one in held]
        yield from _group("model", "", shapes, cut(list(ranks.values()), parts, shapes, paddings))
        states = [one[moments]["state"].get(number, {}) for one in held]
        for key, value in states[0].items():
            of_ranks = [state[key] for state in states]
            if not isinstance(value, TensorStub):
                continue
            if value.shape == parts[0].shape:
                pieces = cut(list(ranks.values()), of_ranks, shapes, paddings)
                yield from _group("optimizer", key, shapes, pieces)
            elif not value.shape:
                first = next(iter(ranks.values()))
                for name in shapes:
                    yield _whole(("optimizer", "state", name, key), first, value)
    yield from _beside(models, is_stage_3=is_stage_3)


_Flat = Sequence[tuple[OpenFlat, TensorStub, int, int]]
"""Consecutive elements: of which file and view, from which element on, and how many."""


def _group(
    what: str, key: str, shapes: Mapping[str, tuple[int, ...]], parts: Sequence[_Flat]
) -> Iterator[_Tensor]:
    for (name, shape), flat in zip(shapes.items(), parts, strict=True):
        path = (what, name) if not key else (what, "state", name, key)
        yield _unflattened(path, tuple(shape), flat)


def _cut_all(
    files: Sequence[OpenFlat],
    parts: Sequence[TensorStub],
    shapes: Mapping[str, tuple[int, ...]],
    paddings: Sequence[int],
) -> Sequence[_Flat]:
    """Stages 1 and 2: one vector of all parameters, cut into a part for each rank."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + prod(part.shape))
    at = 0
    flats: list[_Flat] = []
    for shape, padding in zip(shapes.values(), paddings, strict=True):
        end = at + prod(shape)
        flats.append(
            [
                (file, part, max(at, start) - start, min(end, stop) - max(at, start))
                for file, part, start, stop in zip(files, parts, starts, starts[1:], strict=False)
                if max(at, start) < min(end, stop)
            ]
        )
        at = end + padding
    return flats


def _cut_each(
    files: Sequence[OpenFlat],
    parts: Sequence[TensorStub],
    shapes: Mapping[str, tuple[int, ...]],
    _paddings: Sequence[int],
) -> Sequence[_Flat]:
    """Stage 3: each parameter cut into a part for each rank, which keeps its parts in a row."""
    at = 0
    flats: list[_Flat] = []
    for shape in shapes.values():
        n = prod(shape)
        of_rank = -(-n // len(files))
        flats.append(
            [
                (file, part, at, min(of_rank, n - of_rank * rank))
                for rank, (file, part) in enumerate(zip(files, parts, strict=True))
                if of_rank * rank < n
            ]
        )
        at += of_rank
    return flats


def _beside(models: Sequence[OpenFlat], *, is_stage_3: bool) -> Iterator[_Tensor]:
    """Buffers, and parameters that are not trained."""
    state = models[0].state
    for name in state["buffer_names"]:
        if name in state["module"]:
            yield _whole(("model", name), models[0], state["module"][name])
    for name, shape in (state.get("frozen_param_shapes") or {}).items():
        stubs = [model.state["frozen_param_fragments"][name] for model in models]
        if not is_stage_3:
            yield _whole(("model", name), models[0], stubs[0])
            continue
        (flat,) = _cut_each(models, stubs, {name: shape}, ())
        yield _unflattened(("model", name), tuple(shape), flat)


def _unflattened(path: tuple[str, ...], shape: tuple[int, ...], flat: _Flat) -> _Tensor:
    """The tensor whose elements, in row-major order, are those of `flat`."""
    pieces, start = [], 0
    for file, stub, at, n in flat:
        for elements, offset in slices_of_range(shape, start, n):
            pieces.append(_Piece(elements, file, stub, at + offset))
        start += n
    if start != prod(shape):
        raise _Uneven(f"the partitions hold {start:,} of {prod(shape):,} elements of {path[-1]}")
    if not pieces:
        raise _Uneven(f"{path[-1]} has no elements")
    return _Tensor(path, shape, pieces)


def slices_of_range(
    shape: tuple[int, ...], start: int, n: int
) -> Iterator[tuple[TensorSlice, int]]:
    """The slices that `n` elements of a tensor in row-major order make up, from `start` on.

    With each slice, how many elements come before it. At most two for each dimension.
    """
    if not shape:
        yield TensorSlice((), ()), 0
        return
    row = prod(shape[1:])
    done = 0
    while done < n:
        first, inside = divmod(start + done, row)
        left = n - done
        if inside or left < row:
            taken = min(row - inside, left)
            for part, offset in slices_of_range(shape[1:], inside, taken):
                elements = TensorSlice((first, *part.offsets), (1, *part.sizes))
                yield elements, done + offset
        else:
            rows = left // row
            taken = rows * row
            offsets = (first, *(0 for _ in shape[1:]))
            yield TensorSlice(offsets, (rows, *shape[1:])), done
        done += taken


_READERS = {"verl": _verl, "deepspeed": _deepspeed}


# What they come to


class _ShardFiles(SourceFiles):
    """The elements of shards, by the name of a tensor and the offsets of a chunk."""

    def __init__(self, store: Store, url: str, part_path: str) -> None:
        super().__init__(store, "", url, part_path)
        self.views: dict[tuple[str, tuple[int, ...]], Opened] = {}

    def in_store(self, name: str) -> str:
        return name

    def where(self, name: str) -> str:
        return name

    def opened(self, tensor: SourceTensor, number: int, held_limit: int) -> Opened:  # noqa: ARG002
        return self.views[tensor.entry.fqn, tensor.chunks[number].elements.offsets]


def _source(store: Store, url: str, folder: str, tensors: Sequence[_Tensor]) -> ShardSource:
    files = _ShardFiles(store, url, folder)
    made: list[tuple[TensorEntry, list[SourceChunk]]] = []
    proven: set[tuple[str, str]] = set()
    digest = hashlib.sha256(os.fsencode(url))
    for tensor in tensors:
        fqn, dtype = ".".join(tensor.path), tensor.pieces[0].stub.dtype
        chunks = []
        for piece in tensor.pieces:
            if 0 in piece.elements.sizes and 0 not in tensor.shape:
                continue
            view, record = _opened(fqn, piece, proven)
            files.views[fqn, piece.elements.offsets] = view
            chunks.append(SourceChunk(piece.elements, record))
            digest.update(repr((fqn, piece.elements, record, view.crc)).encode())
        made.append((tensor_entry(fqn, dtype, tensor.shape, tensor.path), chunks))
    return ShardSource(part_of(folder, made, digest.hexdigest()), files)


def _opened(fqn: str, piece: _Piece, proven: set[tuple[str, str]]) -> tuple[Opened, ByteRange]:
    """Where the elements of a piece are; the first piece of a storage answers for its bytes."""
    file, stub = piece.file, piece.stub
    member = storage_of(fqn, stub, file.members)
    opened = opened_at(stub, member, None)
    if not opened.is_row_major:
        raise NotPlain(f"{fqn} is transposed in {file.path}, which is not read from shards")
    item = DTYPE_SIZES[stub.dtype]
    answers = (file.path, member.name) not in proven and file.has_crcs and member.size
    proven.add((file.path, member.name))
    view = opened._replace(
        crc=member.crc if answers else None,
        first=opened.first + piece.at * item,
        strides=row_major(piece.elements.sizes, item),
    )
    return view, ByteRange(file.path, member.start, member.size)
