"""Find weights that were lost before the save: NaN in tensors, where the step's log ends so too.

transformers keeps its log in each step. A loss or gradient norm that is not finite proves
nothing alone: a scaler for fp16 skips such a step, and the mean over a batch without labels is
NaN. NaN in a tensor of the model proves it, and is searched in a few tensors only then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckptctl.errors import RecordUnreadable
from ckptctl.findings import Finding
from ckptctl.formats.archive.safetensors import PREFIX, TORCH_NAMES, parse_header
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.records.not_finite import FORMS, FiniteScan
from ckptctl.records.reads import read_headers
from ckptctl.storage.contract import read_range

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
                expected="finite weights",
                found="NaN",
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
