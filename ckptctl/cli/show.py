"""`ckptctl show`: print the contents of a step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import ckptctl
from ckptctl.cli.options import StepArg, only
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import (
    Line,
    StyledText,
    cell_width,
    finding_lines,
    line,
    next_line,
    padded,
    ranks_in_words,
    section,
    state_lines,
)
from ckptctl.formatting import counted, exact_size, percent, safe, size, some_of
from ckptctl.options import Parameter, Requirements, StorageOptions
from ckptctl.selection.verifying import Contents, TensorRow

EXAMPLES = (
    "ckptctl show /shared/ckpt/run-1234@auto",
    "ckptctl show s3://bucket/run-1234/step_1200 --tensors | grep embed",
    "ckptctl loss train.log --resume-step $(ckptctl show /ckpt/step_1200 --print train-step)",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 75, 77)


Printed = Literal["step", "train-step", "tokens", "world-size"]
"""The one value that `show --print` puts on standard output."""


def show(
    step: StepArg,
    tensors: Annotated[
        bool,
        Parameter(
            "--tensors", "List every tensor, instead of one row for the same tensor of all layers."
        ),
    ] = False,
    printed: Annotated[
        Printed | None,
        Parameter(
            "--print",
            "Print only this: the number in the step's name, the training step that the train "
            "state holds, its token count, or how many ranks saved it; nothing where it is not "
            "known.",
            variable="CKPTCTL_PRINT_OF_SHOW",
        ),
    ] = None,
    *,
    requirements: Annotated[Requirements, only("pattern", "state")],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Show the contents of a step: tensors, sizes, ranks, and what a resume restores.

    Reads the metadata, the pickles of rank files, and the headers of safetensors. With --quiet
    the names of the tensors are printed, one a line.
    """
    contents = ckptctl.show(step, requirements=requirements, storage=storage)
    out.answer(
        document_of("show", contents),
        lambda: contents_lines(contents, every_tensor=tensors, width=out.out.width),
        bare=map(safe, dict.fromkeys(tensor.fqn for tensor in contents.tensors))
        if printed is None
        else _values(contents, printed),
        bare_only=printed is not None,
    )
    return contents.exit_code


def _values(contents: Contents, printed: Printed) -> tuple[str, ...]:
    ranks = None if contents.world_size is None else contents.world_size.size
    values = {
        "step": contents.number,
        "train-step": contents.train_step,
        "tokens": contents.state.tokens.value,
        "world-size": ranks,
    }
    return () if values[printed] is None else (str(values[printed]),)


def contents_lines(contents: Contents, *, every_tensor: bool, width: int | None) -> list[Line]:
    """Facts first, then the tensors, then the shard files."""
    return [
        *section(_head(contents)),
        *section(finding_lines(contents.findings)),
        *section(state_lines(contents.state, usable=contents.exit_code == 0)),
        *section(_bytes_by_kind(contents)),
        *_tables(contents, every_tensor=every_tensor, width=width),
        *section(_shards(contents)),
        *next_line(contents.next_command),
    ]


def _head(contents: Contents) -> Iterator[Line]:
    number = "" if contents.number is None else f"step {contents.number}: "
    params = "" if contents.n_params is None else f"{contents.n_params:,} parameters, "
    head = f"{number}{params}{exact_size(contents.n_bytes)}"
    yield line(StyledText(head, "strong"), hang=2)
    yield line("  ", StyledText(contents.url, "name"), solid=True)
    yield line(f"  layout {contents.layout}, {ranks_in_words(contents.world_size)}", hang=4)
    if contents.torch_version != "unknown":
        yield line(f"  metadata of torch {contents.torch_version}", hang=4)
    if contents.checkpoint_id is not None:
        yield line("  saved as ", StyledText(str(contents.checkpoint_id), "name"), solid=True)


def _bytes_by_kind(contents: Contents) -> list[Line]:
    total = sum(n_bytes for _, n_bytes in contents.bytes_by_kind) or 1
    width = max((len(kind) for kind, _ in contents.bytes_by_kind), default=0)
    return [
        line(f"  {kind:<{width}}  {size(n_bytes):>9}  {percent(n_bytes / total):>7}")
        for kind, n_bytes in contents.bytes_by_kind
    ]


def _tables(contents: Contents, *, every_tensor: bool, width: int | None) -> Iterator[Line]:
    """A table of the tensors in shard files, and of each file that states its own.

    Files that hold tensors of the same names, dtypes and shapes, as those of ranks do, share one.
    """
    by_file: dict[str | None, list[TensorRow]] = {}
    for row in contents.tensors:
        by_file.setdefault(row.file, []).append(row)
    alike: dict[tuple[object, ...], list[str | None]] = {}
    for file, rows in by_file.items():
        key = tuple((row.fqn, row.dtype, row.shape, row.whole_shape) for row in rows)
        alike.setdefault((*key, file is None), []).append(file)
    if not every_tensor and any(row.kind == "model" for row in contents.tensors):
        alike = {
            key: files
            for key, files in alike.items()
            if any(row.kind == "model" for row in by_file[files[0]])
        }
    n_listed = 0
    for files in alike.values():
        rows = by_file[files[0]]
        if every_tensor:
            groups = [TensorGroup.of([row]) for row in rows]
        else:
            groups = grouped([row for row in rows if row.kind == "model"] or rows)
        n_listed += len(files) * sum(group.n_tensors for group in groups)
        names = [name for name in files if name is not None]
        each = ", each" if len(names) > 1 else ""
        head = line("  ", StyledText(safe(some_of(names)), "name"), each, solid=True)
        yield from section([*([head] if names else ()), *_tensor_table(groups, width)])
    n_more = len(contents.tensors) - n_listed
    if n_more:
        yield from section([line(f"  and {counted(n_more, 'tensor')} more (--tensors)")])
    if contents.unlisted:
        what = f"the tensors of {counted(len(contents.unlisted), 'file')} are not listed"
        yield from section([line(f"  {what}: {some_of(contents.unlisted)}", hang=4)])


_COLUMNS = ("tensor", "dtype", "shape", "chunks", "size")


def _tensor_table(groups: Sequence[TensorGroup], width: int | None) -> Iterator[Line]:
    """A row for each group; where that is too wide for the terminal, the name above the rest."""
    if not groups:
        return
    table = [_COLUMNS, *(group.cells for group in groups)]
    widths = [max(cell_width(row[i]) for row in table) for i in range(len(_COLUMNS))]
    fits = width is None or sum(widths) + 2 * len(widths) <= width
    for row in table:
        name, *rest = (padded(cell, widths[i], right=i > 2) for i, cell in enumerate(row))
        facts = [span for cell in rest for span in ("  ", cell)]
        if fits:
            yield line("  ", name, *facts, solid=True)
        else:
            yield line("  ", StyledText(row[0], "name"), solid=True)
            yield line("    ", *facts, solid=True)


def _shards(contents: Contents) -> Iterator[Line]:
    if not contents.shards:
        return
    sizes = sorted(shard.n_bytes for shard in contents.shards)
    spread = f"{size(sizes[0])} to {size(sizes[-1])}" if sizes[0] < sizes[-1] else size(sizes[0])
    n_records = sum(shard.n_records for shard in contents.shards)
    n_pickled = len(contents.bytes_entries)
    yield line(
        f"  {counted(len(sizes), 'shard file')} of {spread}, {counted(n_records, 'record')}, "
        f"{n_pickled:,} entries pickled",
        hang=4,
    )


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one dtype and shape whose names differ in numbers only."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...] | None
    n_tensors: int
    n_chunks: int
    n_bytes: int

    @classmethod
    def of(cls, rows: Sequence[TensorRow]) -> TensorGroup:
        """The rows as one."""
        # `layers.{0..31}.weight` for `layers.0.weight` to `layers.31.weight`; gaps are listed.
        columns = zip(*map(_numbers, rows), strict=True)
        ranges = iter([_number_range({*map(int, column)}) for column in columns])
        return cls(
            _INDEX.sub(lambda _: next(ranges), rows[0].fqn),
            rows[0].dtype,
            rows[0].shape,
            rows[0].whole_shape,
            len(rows),
            sum(row.n_chunks for row in rows),
            sum(row.n_bytes for row in rows),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        shape = _shape(self.shape)
        if self.whole_shape is not None:
            shape += f" of {_shape(self.whole_shape)}"
        times = f"  ({self.n_tensors:,} of them)" if self.n_tensors > 1 else ""
        return (self.name, self.dtype, shape + times, f"{self.n_chunks:,}", size(self.n_bytes))


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


_INDEX = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")


def grouped(rows: Sequence[TensorRow]) -> list[TensorGroup]:
    """The tensors, with those of equal names but for the numbers taken together.

    A group holds every combination of the numbers that its name shows.
    """
    alike: dict[tuple[object, ...], list[TensorRow]] = {}
    for row in rows:
        key = (_INDEX.sub("*", row.fqn), row.dtype, row.shape, row.whole_shape)
        alike.setdefault(key, []).append(row)
    return [TensorGroup.of(part) for group in alike.values() for part in _complete(group)]


_MAX_VARYING = 4
"""Numbers in a name that may vary; beyond, and with gaps, each tensor has a row."""


def _complete(rows: Sequence[TensorRow]) -> Iterator[Sequence[TensorRow]]:
    """The rows in as few groups as hold every combination of their numbers."""
    columns = [set(numbers) for numbers in zip(*map(_numbers, rows), strict=True)]
    varying = [at for at, numbers in enumerate(columns) if len(numbers) > 1]
    if len(varying) < 2 or len(rows) == prod(len(numbers) for numbers in columns):
        yield rows
        return
    if len(varying) > _MAX_VARYING:
        yield from ([row] for row in rows)
        return
    by_first: dict[str, list[TensorRow]] = {}
    for row in rows:
        by_first.setdefault(_numbers(row)[varying[0]], []).append(row)
    for part in by_first.values():
        yield from _complete(part)


def _numbers(row: TensorRow) -> list[str]:
    return _INDEX.findall(row.fqn)


_MAX_RANGES = 8


def _number_range(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{{{ordered[0]}..{ordered[-1]}}}"
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs[:_MAX_RANGES]
    ]
    return f"{{{','.join([*shown, '...'] if len(runs) > _MAX_RANGES else shown)}}}"
