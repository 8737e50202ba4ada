"""Check that the chunks in the metadata tile each tensor exactly once.

A load reads slices of the global tensor. An element that no chunk holds keeps
whatever was in memory before (torch 2.13 raises nothing), so this is asked
before any load is tried. Only metadata is read; whether the bytes behind a
chunk exist is the question of `presence`.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod
from operator import add

from ckptctl.findings import Finding, at_most_few
from ckptctl.formatting import counted, inside, verb
from ckptctl.model import Chunks, Metadata, RangeColumns, TensorEntry

Bounds = tuple[tuple[int, int], ...]
"""Begin and end of a box of elements, a pair for each dimension."""

_FREE_VISITS = 250_000
_VISITS_TO_DECIDE = 64
_VISITS_TO_EXPLAIN = 8
"""How many slices may be compared, however few chunks there are, and how many more for each
chunk. n chunks cut along d dimensions cost at most 2^d n visits to decide, a grid of them n."""


def check_part_coverage(metadatas: Sequence[Metadata], part_path: str = "") -> Iterator[Finding]:
    """Yield what `check_coverage` finds in each tensor of a part, its place relative to the step.

    Several metadata are those of a step saved without collectives: each rank has
    its own, in which a tensor is whole in shape and in part in chunks. Together
    they fill it, and replicas are in it once for each rank that holds one.
    """
    yield from at_most_few(
        replace(finding, where=inside(part_path, finding.where))
        for tensor in _tensors_of(metadatas)
        for finding in check_coverage(tensor, replicas_ok=len(metadatas) > 1)
    )


def check_coverage(tensor: TensorEntry, *, replicas_ok: bool = False) -> Iterator[Finding]:
    """Yield a finding for chunks that overlap, stick out, or leave a gap.

    `tensor.shape` and each chunk's `offsets` and `sizes` are in elements, one
    entry per dimension; a 0-d tensor has empty tuples and one element. Chunks
    without elements hold nothing and are sound anywhere inside. `replicas_ok`
    takes several chunks at one place for one.

    Yields `coverage.overlap`, `coverage.outside`, `coverage.gap`; nothing for a
    sound tensor. Exact for any number of dimensions. `format.unsupported` where
    chunks of many dimensions are so entangled that a proof would take too long.

    Cost: linear in the chunks, times 2 for each dimension they are cut along,
    less where they form a grid; no bytes are read.
    """
    if _is_a_grid(tensor):
        return
    slices, n_outside = _slices_of(tensor)
    if n_outside:
        yield Finding(
            "coverage.outside",
            tensor.fqn,
            f"{counted(n_outside, 'chunk')} of {len(tensor.chunks):,} "
            f"{verb(n_outside, 'extends', 'extend')} beyond the tensor",
            expected=f"offsets and sizes within {_shape(tensor.shape)}",
        )
    if replicas_ok:
        slices = list(dict.fromkeys(slices))
    try:
        filled = _fill(
            slices, tensor.shape, _Visits(_FREE_VISITS + _VISITS_TO_DECIDE * len(slices))
        )
    except _TooMany:
        yield Finding(
            "format.unsupported",
            tensor.fqn,
            f"its {len(slices):,} chunks of {len(tensor.shape)} dimensions overlap too "
            "irregularly to decide whether they cover it",
        )
        return
    if filled:
        return
    try:
        yield from _explain(
            tensor, slices, _Visits(_FREE_VISITS + _VISITS_TO_EXPLAIN * len(slices))
        )
    except _TooMany:
        yield _at_least(tensor, slices)


class _TooMany(Exception):
    """The visits that were allowed are used up."""


@dataclass(slots=True)
class _Visits:
    left: int

    def spend(self, number: int) -> None:
        self.left -= number
        if self.left < 0:
            raise _TooMany


def _tensors_of(metadatas: Sequence[Metadata]) -> Iterator[TensorEntry]:
    if len(metadatas) == 1:
        yield from metadatas[0].tensors.values()
        return
    # Ranks may keep tensors of their own under one name: those differ in shape.
    alike: dict[tuple[str, tuple[int, ...]], list[TensorEntry]] = defaultdict(list)
    for tensor in chain.from_iterable(metadata.tensors.values() for metadata in metadatas):
        alike[tensor.fqn, tensor.shape].append(tensor)
    for tensors in alike.values():
        yield replace(tensors[0], chunks=_together([tensor.chunks for tensor in tensors]))


def _together(ranks: Sequence[Chunks]) -> Chunks:
    """The chunks of all ranks, without their byte ranges."""
    n_chunks = sum(map(len, ranks))
    offsets, sizes = array("q"), array("q")
    for chunks in ranks:
        offsets.extend(chunks.offsets)
        sizes.extend(chunks.sizes)
    return Chunks(ranks[0].n_dims, offsets, sizes, RangeColumns.missing(n_chunks))


def _is_a_grid(tensor: TensorEntry) -> bool:
    """The usual sound case, recognized by its columns: the chunks are the cells of a grid.

    Along each dimension the chunks have few places, which follow each other from end to end: so
    their products, the cells, fill the tensor. It remains to find each cell once.
    """
    chunks, n_dims = tensor.chunks, tensor.chunks.n_dims
    at_first = array("q", [0]) * len(chunks)
    n_cells, cut = 1, []
    for dim, n_elements in enumerate(tensor.shape):
        begins, sizes = chunks.offsets[dim::n_dims], chunks.sizes[dim::n_dims]
        if n_elements and begins == at_first and sizes == array("q", [n_elements]) * len(chunks):
            continue
        if min(sizes, default=0) < 1:
            return False
        n_places = len(chunks)
        if not _follow(begins, sizes, n_elements):
            places = dict(zip(begins, sizes, strict=True))
            n_places = len(places)
            if n_places < len(chunks) and [*map(places.__getitem__, begins)] != sizes.tolist():
                return False
            order = sorted(places)
            if not _follow(order, list(map(places.__getitem__, order)), n_elements):
                return False
        n_cells *= n_places
        cut.append(begins)
    return n_cells == len(chunks) == (len(set(zip(*cut, strict=True))) if len(cut) > 1 else n_cells)


def _follow(begins: Sequence[int], sizes: Sequence[int], n_elements: int) -> bool:
    """Whether the places follow each other from end to end, from 0 to `n_elements`."""
    return [0, *map(add, begins, sizes)] == [*begins, n_elements]


def _slices_of(tensor: TensorEntry) -> tuple[list[Bounds], int]:
    """The chunks that have elements and lie inside the tensor, and how many lie outside."""
    chunks, n_dims = tensor.chunks, tensor.chunks.n_dims
    if n_dims == 0:
        return [()] * len(chunks), 0
    columns = []
    all_inside = True
    for dim, n_elements in enumerate(tensor.shape):
        begins, sizes = chunks.offsets[dim::n_dims], chunks.sizes[dim::n_dims]
        ends = list(map(add, begins, sizes))
        columns.append(zip(begins, ends, strict=True))
        lowest = min(min(begins, default=0), min(sizes, default=0))
        all_inside = all_inside and lowest >= 0 and max(ends, default=0) <= n_elements
    slices: list[Bounds] = list(zip(*columns, strict=True))
    n_outside = 0
    if not all_inside:
        slices = [bounds for bounds in slices if _is_inside(bounds, tensor.shape)]
        n_outside = len(chunks) - len(slices)
    if 0 in chunks.sizes:
        slices = [bounds for bounds in slices if all(begin < end for begin, end in bounds)]
    return slices, n_outside


def _is_inside(bounds: Bounds, shape: Sequence[int]) -> bool:
    return all(0 <= begin <= end <= n for (begin, end), n in zip(bounds, shape, strict=True))


def _fill(slices: Sequence[Bounds], shape: Sequence[int], visits: _Visits) -> bool:
    """Whether the slices fill `shape` exactly once."""
    if not slices:
        return prod(shape) == 0
    columns = list(zip(*slices, strict=True))
    cut = [dim for dim, column in enumerate(columns) if set(column) != {(0, shape[dim])}]
    if not cut:
        return len(slices) == 1
    signed: dict[Bounds, int] = defaultdict(int)
    for bounds in zip(*(columns[dim] for dim in cut), strict=True):
        signed[bounds] += 1
    signed[tuple((0, shape[dim]) for dim in cut)] -= 1
    return _cancel(signed, visits)


def _cancel(counts: Mapping[Bounds, int], visits: _Visits) -> bool:
    """Whether slices, each counted as in `counts`, add up to zero at every element.

    Along one dimension the sum over an element changes only where slices begin or
    end. It is zero throughout if at each such place what begins there cancels what
    ends there: the same question, with one dimension less. In a grid of chunks the
    two are the same slices. The last place follows from the others.
    """
    signed = {bounds: count for bounds, count in counts.items() if count}
    if not signed:
        return True
    visits.spend(len(signed))
    if len(signed) == 1:
        return False
    edges: dict[int, dict[Bounds, int]] = {}
    for bounds, count in signed.items():
        begin, end = bounds[0]
        rest = bounds[1:]
        for at, change in ((begin, count), (end, -count)):
            edge = edges.setdefault(at, {})
            edge[rest] = edge.get(rest, 0) + change
    edges.popitem()
    return all(_cancel(edge, visits) for edge in edges.values())


@dataclass(slots=True)
class _Uneven:
    """How many elements are in no box and in several, and where the first of each are."""

    missing: int = 0
    repeated: int = 0
    gap: Bounds | None = None
    overlap: Bounds | None = None


def _explain(tensor: TensorEntry, slices: Sequence[Bounds], visits: _Visits) -> Iterator[Finding]:
    n_elements = prod(tensor.shape)
    uneven = _count(slices, tensor.shape, visits)
    if uneven.overlap is not None:
        corner = [begin for begin, _ in uneven.overlap]
        holders = [bounds for bounds in slices if _holds(bounds, corner)]
        yield Finding(
            "coverage.overlap",
            tensor.fqn,
            f"{uneven.repeated:,} of {n_elements:,} elements are in more than one chunk",
            expected="each element in one chunk",
            found="chunks at " + " and ".join(_offsets(bounds) for bounds in holders[:2]),
        )
    if uneven.gap is not None:
        sizes = [end - begin for begin, end in uneven.gap]
        yield Finding(
            "coverage.gap",
            tensor.fqn,
            f"{uneven.missing:,} of {n_elements:,} elements are in no chunk",
            expected=f"{n_elements:,} elements in chunks",
            found=f"no chunk for the {_shape(sizes)} elements at {_offsets(uneven.gap)}",
        )


def _at_least(tensor: TensorEntry, slices: Sequence[Bounds]) -> Finding:
    """What the number of elements alone shows about slices that do not fill the tensor."""
    n_elements = prod(tensor.shape)
    missing = n_elements - sum(prod(end - begin for begin, end in bounds) for bounds in slices)
    if missing > 0:
        message = f"at least {missing:,} of {n_elements:,} elements are in no chunk"
        return Finding("coverage.gap", tensor.fqn, message)
    message = f"some of {n_elements:,} elements are in more than one chunk"
    return Finding("coverage.overlap", tensor.fqn, message)


def _count(slices: Sequence[Bounds], shape: Sequence[int], visits: _Visits) -> _Uneven:
    """Count slab by slab, each between two neighbouring edges along the first dimension.

    Within a slab the slices are the same: what they leave is the same question, with
    one dimension less.
    """
    visits.spend(len(slices) + 1)
    if not shape:
        return _Uneven(
            missing=int(len(slices) == 0),
            repeated=int(len(slices) > 1),
            gap=None if slices else (),
            overlap=() if len(slices) > 1 else None,
        )
    beginning: dict[int, list[Bounds]] = defaultdict(list)
    ending: dict[int, list[Bounds]] = defaultdict(list)
    for bounds in slices:
        beginning[bounds[0][0]].append(bounds[1:])
        ending[bounds[0][1]].append(bounds[1:])
    total = _Uneven()
    across: Counter[Bounds] = Counter()
    for begin, end in pairwise(sorted({0, shape[0], *beginning, *ending})):
        across.update(beginning[begin])
        for rest in ending[begin]:
            across[rest] -= 1
            if not across[rest]:
                del across[rest]
        slab = _count(list(across.elements()), shape[1:], visits)
        total.missing += slab.missing * (end - begin)
        total.repeated += slab.repeated * (end - begin)
        if total.gap is None and slab.gap is not None:
            total.gap = ((begin, end), *slab.gap)
        if total.overlap is None and slab.overlap is not None:
            total.overlap = ((begin, end), *slab.overlap)
    return total


def _holds(bounds: Bounds, corner: Sequence[int]) -> bool:
    return all(begin <= at < end for (begin, end), at in zip(bounds, corner, strict=True))


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(f"{n:,}" for n in sizes) if sizes else "one element"


def _offsets(bounds: Bounds) -> str:
    return str(tuple(begin for begin, _ in bounds))
