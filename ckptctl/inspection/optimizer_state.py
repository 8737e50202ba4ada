"""See whether the state of the optimizer is real, and whether the weights are still finite.

An optimizer may be zero, impossible, of another shape, or stale. Such a step is whole and every
byte of it is as it was saved; a resume from it starts the optimizer anew, or with the moments of
another time. Tensors of DCP are scanned in the pass that compares the bytes, and those in files of
`torch.save` in one of their own.

transformers keeps its log in each step. A loss or gradient norm that is not finite proves
nothing alone: a scaler for fp16 skips such a step, and the mean over a batch without labels is
NaN. NaN in a tensor of the model proves it, and is searched in a few tensors only then.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import TypeVar

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe, RecordUnreadable, StorageError
from ckptctl.findings import Finding, explained
from ckptctl.formats.archive.directory import RecordDirectory, read_member
from ckptctl.formats.archive.safetensors import PREFIX, TORCH_NAMES, parse_header
from ckptctl.formats.frameworks.layouts import belongs_to_shards, is_own
from ckptctl.formats.frameworks.parts import may_be_archive
from ckptctl.formats.frameworks.state_keys import has_shape_of_parameter, is_moment_name, is_square
from ckptctl.formats.own.marks import MarkKind
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.values import ShardStub, TensorStub, decode_shards
from ckptctl.formatting import command_line, counted, inside, some_of, verb
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.predecessor import Before, compared_before
from ckptctl.inspection.sidecars import MAX_PICKLE_BYTES, FileReads, in_archive, value_in_record
from ckptctl.inspection.structure import NO_CRC
from ckptctl.model import DTYPE_SIZES, SHARDED, Metadata, TensorEntry
from ckptctl.records.byte_pass import Limits, Piece, read_runs
from ckptctl.records.loading import Caller, MemoryTarget, SliceLoads
from ckptctl.records.not_finite import FORMS, FiniteScan, Form, Values
from ckptctl.records.opening import Unfit
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource, read_headers
from ckptctl.records.slices import Strided, blocks, row_major
from ckptctl.storage.contract import read_range

N_COMPARED = 64
"""So many records of moments, and of weights, are compared with the step before."""

_COMPARED_BYTES = 16 << 10
"""Bytes of each mean of squares that are compared with the step before."""

_MOST_OF_A_VALUE = 64 << 10

_MOST_FILES = 512

_UNREADABLE = (StorageError, RecordUnreadable, MetadataUnreadable, MetadataUnsafe, Unfit)

_MEANS = ("exp_avg_sq",)
"""What decays by the last of `betas`: the means of squares of Adam and its kin."""

_FORMS = {"float32": "f", "float64": "d"}
"""Of narrower dtypes, rounding may let a value fall faster."""

_STEP_FORMS = {**_FORMS, "int64": "q", "int32": "i"}

_SLACK = 0.9
"""What rounding may take of a value over all steps: less than 1e-4 in a thousand."""

_FEW_BELOW = 0.01
_TINY = 1e-30
"""Smaller values may be flushed to zero."""

_Number = TypeVar("_Number")


def check_optimizer_state(
    opened: OpenStep,
    values: Mapping[str, Values],
    train_step: int | None,
    limits: Limits | None = None,
) -> Iterator[Finding]:
    """Yield what is wrong with the tensors that an optimizer keeps.

    `values` are those that were scanned, by the path of the part and the FQN; files of
    `torch.save` are read within `limits`, and not at all without. Yields
    `optimizer.zero`, `optimizer.idle`, `optimizer.negative`, `optimizer.shape`,
    `optimizer.unchanged`, `optimizer.discontinuous`, and `optimizer.unseen` where state of an
    optimizer was not read. Cost: besides the bytes that were scanned, one metadata of the step
    before, and in each of both steps `4 * N_COMPARED` short reads; of files of `torch.save` three
    short reads each, and what optimizers keep in them.
    """
    parts = [p for p in opened.parts if p.part.format in SHARDED and len(p.metadata) == 1]
    moments = {
        inside(part.path, fqn): entry
        for part in parts
        for fqn, entry in part.metadata[0].tensors.items()
        if is_moment_name(fqn)
    }
    scanned = {name: values[name] for name in moments if name in values}
    if limits is not None:
        scanned |= _in_files(opened, limits)
    if not scanned:
        yield Finding(
            "optimizer.unseen",
            "",
            "no tensor that an optimizer keeps was read: the step has none, or its optimizer names "
            "them otherwise",
            next_command=command_line("show", opened.url, "--tensors"),
        )
        return
    yield from _zero(opened, scanned, train_step)
    negative = [n for n, one in scanned.items() if is_square(n) and one.n_negative]
    if negative:
        total = sum(scanned[name].n_negative for name in negative)
        yield explained(
            "optimizer.negative",
            negative[0],
            f"{counted(len(negative), 'mean')} of squares {verb(len(negative), 'is', 'are')} below "
            f"zero in {counted(total, 'value')} ({some_of(negative)}): no optimizer writes that",
        )
    for part in parts:
        yield from _other_shape(part)
        yield from _compared(opened, part, scanned)


class _ScanRun:
    """Scans the elements of one tensor in a file; see `byte_pass.Run`."""

    def __init__(self, path: str, start: int, n_bytes: int, form: Form) -> None:
        self.path = path
        self.n_bytes = n_bytes
        self._start = start
        self._scan = FiniteScan(form)
        self._size = form.size

    @property
    def values(self) -> Values | None:
        """The result; None if the pass ended before all were read."""
        values = self._scan.values
        return values if values.n_values == self.n_bytes // self._size else None

    def pieces(self, limit: int) -> Iterator[Piece]:
        """See `Run.pieces`."""
        end = self._start + self.n_bytes
        for at in range(self._start, end, limit):
            yield Piece(at, min(limit, end - at))

    def take(self, piece: Piece, data: memoryview) -> None:  # noqa: ARG002 - in order
        """See `Run.take`."""
        self._scan.take(data)


def _in_files(opened: OpenStep, limits: Limits) -> dict[str, Values]:
    """What optimizers keep in files of `torch.save`, by the path of the file and the keys in it.

    Files that are damaged or cannot be read are left to the checks of their bytes.
    """
    runs: dict[str, _ScanRun] = {}
    files = [
        file
        for file in opened.files
        if file.kind == "file" and file.size and may_be_archive(file.path)
        if not belongs_to_shards(file.path) and not is_own(file.path)
    ]
    for file in files[:_MOST_FILES]:
        path = opened.in_store(file.path)
        with suppress(StorageError):
            found = in_archive(opened.store, path, file.size, _moments_in, MAX_PICKLE_BYTES)
            for name, start, n_bytes, form in found or ():
                runs[f"{file.path}: {name}"] = _ScanRun(path, start, n_bytes, form)
    with suppress(StorageError):
        read_runs(opened.store, [*runs.values()], replace(limits, on_progress=None))
    return {name: values for name, run in runs.items() if (values := run.values) is not None}


def _moments_in(directory: RecordDirectory, reads: FileReads) -> list[tuple[str, int, int, Form]]:
    """The moments in an archive: their names, where their elements lie, and their form."""
    pickle = read_member(directory, "data.pkl", reads)
    if pickle is None or read_member(directory, "byteorder", reads) == b"big":
        return []
    members = {member.name: member for member in directory.members}
    found = []
    for path, stub in _tensors_in(decode_shards(pickle), ()):
        name, n_elements = ".".join(path), prod(stub.shape)
        member, form = members.get(f"data/{stub.storage_key}"), FORMS.get(stub.dtype)
        if not is_moment_name(name) or member is None or form is None or stub.signs:
            continue
        # Their order does not matter, but other elements must not lie between them.
        is_dense = n_elements and stub.last - stub.storage_offset + 1 == n_elements
        item_bytes = DTYPE_SIZES[stub.dtype]
        first, n_bytes = stub.storage_offset * item_bytes, n_elements * item_bytes
        if is_dense and first + n_bytes <= member.size:
            form = replace(form, signs=is_square(name))
            found.append((name, member.start + first, n_bytes, form))
    return found


def _tensors_in(
    value: object, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], TensorStub]]:
    if isinstance(value, TensorStub | ShardStub):
        yield path, value.local if isinstance(value, ShardStub) else value
    elif isinstance(value, Opaque):
        yield from _tensors_in(value.state, path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors_in(item, (*path, str(number)))


def _zero(
    opened: OpenStep, scanned: Mapping[str, Values], train_step: int | None
) -> Iterator[Finding]:
    zero = [name for name, one in scanned.items() if one.n_values and one.is_zero]
    if not zero or (train_step or 0) < 1:
        return
    if len(zero) == len(scanned):
        yield Finding(
            "optimizer.zero",
            zero[0],
            f"all {len(zero):,} tensors that the optimizer keeps are zero at train step "
            f"{train_step:,}: a resume starts the optimizer anew",
            next_command=command_line("pick", opened.store.url, "--before", str(train_step)),
        )
        return
    yield Finding(
        "optimizer.idle",
        zero[0],
        f"{len(zero):,} of {len(scanned):,} tensors that the optimizer keeps are zero "
        f"({some_of(zero)}): their parameters had no gradient, or their state was lost",
    )


def _other_shape(part: OpenPart) -> Iterator[Finding]:
    tensors = part.metadata[0].tensors
    shapes = _shapes_of_parameters(tensors)
    known = {shape for of_one in shapes.values() for shape in of_one}
    other = []
    alike: dict[str, int] = defaultdict(int)
    for fqn, entry in tensors.items():
        expected = shapes.get(_parameter_of(fqn)) if has_shape_of_parameter(fqn) else None
        if expected and entry.shape in expected:
            alike[_last(fqn)] += 1
        elif expected and entry.shape:
            is_projected = any(_is_projection(entry.shape, shape) for shape in expected)
            if entry.shape in known or not is_projected:
                other.append(f"{fqn} {list(entry.shape)} beside {list(min(expected))}")
    # An optimizer that keeps all of them in another form has another kind of moment.
    other = [text for text in other if alike[_last(text.partition(" ")[0])]]
    if other:
        yield explained(
            "optimizer.shape",
            inside(part.path, other[0].partition(" ")[0]),
            f"{counted(len(other), 'moment')} {verb(len(other), 'has', 'have')} another shape than "
            f"the parameter: {some_of(other)}",
        )


def _is_projection(moment: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Whether a matrix is as long as another in one dimension, and shorter in the other.

    GaLore and its kin keep moments of gradients that are projected to fewer dimensions.
    """
    if len(moment) != 2 or len(parameter) != 2:
        return False
    pairs = sorted(n - whole for n, whole in zip(moment, parameter, strict=True))
    return pairs[0] < 0 == pairs[1]


def _shapes_of_parameters(tensors: Mapping[str, TensorEntry]) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of the tensors that are no moments, by FQN, and by FQN without the first word.

    Two networks may have parameters of one name below it.
    """
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for fqn, entry in tensors.items():
        if not is_moment_name(fqn):
            shapes[fqn].add(entry.shape)
            shapes[fqn.partition(".")[2]].add(entry.shape)
    return shapes


def _last(fqn: str) -> str:
    return fqn.rpartition(".")[2]


def _parameter_of(fqn: str) -> str:
    """The name of the parameter in that of its moment: `optim.state.layers.0.w.exp_avg`."""
    owner = fqn.rpartition(".")[0]
    _, state, name = owner.partition(".state.")
    return name if state else owner.partition(".")[2]


def _compared(opened: OpenStep, part: OpenPart, scanned: Mapping[str, Values]) -> Iterator[Finding]:
    """Compare moments with those of the step before.

    Yields `optimizer.unchanged` where weights have moved, and no moment has, and what `_fallen`
    yields of the `scanned` ones that are not doubted already.
    """
    tensors = part.metadata[0].tensors
    trained = {_parameter_of(fqn) for fqn in tensors if is_moment_name(fqn)}
    moments: list[int] = []
    weights: list[int] = []
    for number in range(len(part.crcs)):
        entry = part.ranges.owner(number).entry
        if not isinstance(entry, TensorEntry) or not entry.shape or part.crcs[number] == NO_CRC:
            continue
        if is_moment_name(entry.fqn):
            moments.append(number)
        elif not trained.isdisjoint((entry.fqn, entry.fqn.partition(".")[2])):
            weights.append(number)
    moments, weights = _spread(moments), _spread(weights)
    before = compared_before(part, [*moments, *weights])
    if before is None:
        return
    same = [n for n in moments if before.crcs.get(n) == part.crcs[n]]
    moved = [n for n in weights if n in before.crcs and before.crcs[n] != part.crcs[n]]
    if same and moved and all(n in same for n in moments if n in before.crcs):
        yield Finding(
            "optimizer.unchanged",
            inside(part.path, part.ranges.owner(same[0]).entry.fqn),
            f"all {counted(len(same), 'compared moment')} {verb(len(same), 'is', 'are')} as in "
            f"{before.opened.name} to the last bit, while {len(moved):,} of {len(weights):,} "
            "compared weights have moved: the state of the optimizer is that of an earlier step",
            next_command=command_line("diff", before.opened.url, opened.url, "--values"),
        )
        return
    doubted = {name for name, one in scanned.items() if one.is_zero or one.n_negative}
    yield from _fallen(opened, part, before, doubted)


class _TensorReader(Caller):
    """Reads the first elements of chunks in the records of one step."""

    def __init__(self, part: OpenPart, metadata: Metadata, folder: str) -> None:
        ranges = Ranges([metadata])
        self.metadata = metadata
        self._source = RecordSource(part.store, folder, ranges)
        firsts = zip(ranges.entries, ranges.first_range, strict=True)
        self._first = {entry.fqn: number for entry, number in firsts}

    def read(self, chunks: Iterable[tuple[str, int]]) -> dict[tuple[str, int], memoryview]:
        """The first `_COMPARED_BYTES` of each chunk, by FQN and number. Raises `StorageError`."""
        memory, wanted = {}, {}
        for fqn, number in chunks:
            entry = self.metadata.tensors[fqn]
            sizes, item_bytes = entry.chunks.sizes_of(number), DTYPE_SIZES[entry.dtype]
            first = next(blocks(sizes, item_bytes, _COMPARED_BYTES))
            held = memory[fqn, number] = memoryview(bytearray(first.n_elements * item_bytes))
            there = Strided(held, 0, row_major(first.sizes, item_bytes))
            target = MemoryTarget(first, item_bytes, there)
            wanted[self._first[fqn] + number] = [target]
        SliceLoads(self._source, self).load(wanted)
        return memory

    def value(self, fqn: str) -> object:
        """The value of an entry that is no tensor."""
        place = self.metadata.bytes_entries[fqn].byte_range
        if place is None or place.transforms or place.length > _MOST_OF_A_VALUE:
            return None
        path = inside(self._source.folder, place.file)
        return value_in_record(read_range(self._source.store, path, place.offset, place.length))

    def item_bytes(self, stub: TensorStub) -> int:
        """See `Caller.item_bytes`."""
        return DTYPE_SIZES[stub.dtype]

    def damage(self, number: int, error: RecordUnreadable | Unfit) -> RecordUnreadable:  # noqa: ARG002
        """See `Caller.damage`."""
        return RecordUnreadable(error.message)


def _fallen(
    opened: OpenStep, part: OpenPart, before: Before, doubted: Collection[str]
) -> Iterator[Finding]:
    """Yield `optimizer.discontinuous` where means of squares fell faster than they can.

    An optimizer multiplies a mean of squares by its decay in each step and adds a square: after
    k steps a value is at least decay^k times what it was. Those of another parameter, and those of
    an optimizer that began anew, are not. Steps that do not count them, or do not hold the decay,
    are not compared. Cost: two short reads of up to `N_COMPARED` records in both steps.
    """
    folder = before.opened.in_store(part.path) if part.path else before.opened.folder
    now = _TensorReader(part, part.metadata[0], part.folder)
    then = _TensorReader(part, before.metadata, folder)
    try:
        if any(mark.word is MarkKind.SUPERSEDED for mark in before.opened.marks[0]):
            return  # the run did not go on from there
        decay = _least_decay(now)
        alike = _same_squares(now.metadata, then.metadata)
        chunks = _spread([one for one in alike if inside(part.path, one[0]) not in doubted])
        counts = [(f"{fqn.rpartition('.')[0]}.step", 0) for fqn, _ in chunks]
        if decay is None or not chunks:
            return
        values = [reader.read([*chunks, *counts]) for reader in (now, then)]
    except _UNREADABLE:
        return  # what is damaged is reported by the comparison of the bytes
    fallen: dict[str, None] = {}
    for chunk, count in zip(chunks, counts, strict=True):
        form = _STEP_FORMS[now.metadata.tensors[count[0]].dtype]
        (n_now,), (n_then,) = (_numbers(one[count], form) for one in values)
        form = _FORMS[now.metadata.tensors[chunk[0]].dtype]
        squares = [_numbers(one[chunk], form) for one in values]
        least = _SLACK * decay ** max(n_now - n_then, 0)
        pairs = [(new, old * least) for new, old in zip(*squares, strict=True)]
        n_below = sum(new < bound for new, bound in pairs if bound > _TINY)
        if n_now >= n_then and n_below > _FEW_BELOW * len(pairs):
            fallen[chunk[0]] = None
    if fallen:
        n_compared = len({fqn for fqn, _ in chunks})
        is_all = len(fallen) == n_compared
        yield Finding(
            "optimizer.discontinuous",
            inside(part.path, next(iter(fallen))),
            f"{len(fallen):,} of {n_compared:,} compared means of squares "
            f"({some_of([*fallen])}) are further below those of {before.opened.name} "
            f"than the steps between allow with a decay of {decay:g}: "
            + ("the optimizer began anew" if is_all else "they are those of other parameters"),
            next_command=command_line("diff", before.opened.url, opened.url, "--values"),
        )


def _same_squares(now: Metadata, then: Metadata) -> Iterator[tuple[str, int]]:
    """The means of squares, by chunk, that both steps hold and count the steps of."""
    for fqn, entry in now.tensors.items():
        count = f"{fqn.rpartition('.')[0]}.step"
        same, is_mean = then.tensors.get(fqn), _last(fqn) in _MEANS
        counts = [one.tensors.get(count) for one in (now, then)]
        if same is None or not is_mean or entry.dtype not in _FORMS or same.dtype != entry.dtype:
            continue
        if any(one is None or one.shape or one.dtype not in _STEP_FORMS for one in counts):
            continue
        for number, chunk in enumerate(entry.chunks):
            before = same.chunks[number] if number < len(same.chunks) else None
            if before and (before.offsets, before.sizes) == (chunk.offsets, chunk.sizes):
                yield fqn, number


def _least_decay(reader: _TensorReader) -> float | None:
    """The least decay of means of squares in the options of the optimizers; None without any."""
    names = [fqn for fqn in reader.metadata.bytes_entries if _last(fqn) == "betas"]
    found = [reader.value(fqn) for fqn in _spread(names)]
    decays = [
        min(betas[1:])
        for betas in found
        if isinstance(betas, tuple | list)
        and len(betas) > 1
        and all(isinstance(one, float) and 0 < one < 1 for one in betas[1:])
    ]
    return min(decays) if len(decays) == len(found) and decays else None


def _numbers(data: memoryview, form: str) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data)


def _spread(numbers: Sequence[_Number]) -> list[_Number]:
    return [*numbers[:: max(1, -(-len(numbers) // N_COMPARED))]]


N_TENSORS = 16
"""How many tensors of a file are read; NaN in one gradient reaches all weights by its norm."""
N_BYTES = 64 << 10
"""Bytes that are read of each."""

_LOGGED = ("loss", "grad_norm")


def check_weights(opened: OpenStep) -> Iterator[Finding]:
    """Yield `state.not-finite` for weights that hold NaN, where the log of the step suggests it.

    Cost: nothing where it does not; else one read of each safetensors file, and of
    `N_TENSORS` tensors of it, until one holds NaN.
    """
    row = _last_row(opened)
    suspect = {} if row is None else {n: v for n in _LOGGED if _is_bad(n, v := row.get(n))}
    if not suspect:
        return
    for part in opened.parts:
        for held in part.safetensors:
            found = _holding_nan(held)
            if found is None:
                continue
            path, names = found
            name, value = next(iter(suspect.items()))
            yield Finding(
                "state.not-finite",
                held.in_step(path),
                f"{counted(len(names), 'tensor')} of those that were read hold NaN "
                f"({some_of(names)}), and the last {name} that was logged is {value}: training "
                "had diverged before the save, and a resume from here would repeat that",
                next_command=command_line("pick", opened.store.url),
            )
            return


def _last_row(opened: OpenStep) -> Mapping[object, object] | None:
    """The last row of the log in the step that has a loss or a gradient norm."""
    for sidecar in opened.sidecars:
        log = sidecar.content.get("log_history") if isinstance(sidecar.content, Mapping) else None
        for row in reversed(log) if isinstance(log, list) else ():
            if isinstance(row, Mapping) and any(name in row for name in _LOGGED):
                return row
    return None


def _is_bad(name: str, value: object) -> bool:
    """Whether a logged value is none of sound weights; a loss of 0 is what a filter makes of NaN.

    Source: transformers 5.23 `trainer.py`, `logging_nan_inf_filter`.
    """
    if isinstance(value, str):
        return value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity")
    if not isinstance(value, (int, float)):
        return False
    return not math.isfinite(value) or (name == "loss" and value == 0)


def _holding_nan(part: OpenPart) -> tuple[str, list[str]] | None:
    """The first file of which a tensor that was read holds NaN, with the names of those."""
    for file, header in read_headers(part.store, part.folder, part.part.files):
        try:
            tensors = parse_header(header[PREFIX:])
        except RecordUnreadable:
            continue
        tensors = tuple(t for t in tensors if t.n_bytes and TORCH_NAMES.get(t.dtype) in FORMS)
        names = []
        for tensor in tensors[:: max(1, -(-len(tensors) // N_TENSORS))]:
            scan = FiniteScan(FORMS[TORCH_NAMES[tensor.dtype]])
            start = len(header) + tensor.start
            n_bytes = min(tensor.n_bytes, N_BYTES)
            scan.take(read_range(part.store, part.in_store(file.path), start, n_bytes))
            if scan.values.n_nan:
                names.append(tensor.name)
        if names:
            return file.path, names
    return None
