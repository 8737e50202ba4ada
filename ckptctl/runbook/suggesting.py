"""Suggest a value for an input that was not given: from the scheduler, or a log beside the root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptctl.runbook.document import Input, Value
from ckptctl.storage.opening import local_path

_LOG_SUFFIXES = frozenset({".log", ".out", ".err", ".jsonl"})
_OF_SLURM = {
    "WORLD_SIZE": ("SLURM_NTASKS", "{}"),
    "LAUNCHER": ("SLURM_JOB_ID", "srun --jobid {} --overlap --ntasks-per-node=1"),
}


def suggestion(wanted: Input, variables: Mapping[str, Value]) -> str | None:
    """A value for an input, which a person confirms; None if nothing was found."""
    if wanted.name in _OF_SLURM:
        variable, form = _OF_SLURM[wanted.name]
        value = os.environ.get(variable, "")
        return form.format(value) if value.isascii() and value.isdigit() else None
    if wanted.type not in ("log", "new-log"):
        return None
    logs = variables.get("LOG", ())
    known = {os.path.abspath(log) for log in ((logs,) if isinstance(logs, str) else logs)}
    root = variables.get("ROOT")
    beside = local_path(root) if isinstance(root, str) else None
    found = [log for log in _logs_beside(beside) if os.path.abspath(log) not in known]
    return str(max(found, key=lambda log: log.stat().st_mtime)) if found else None


def _logs_beside(root: str | None) -> Iterator[Path]:
    """The logs in the root, beside it, and in the current folder."""
    folders = [Path.cwd()] if root is None else [Path(root), Path(root).parent, Path.cwd()]
    for folder in folders:
        try:
            files = [file for file in folder.iterdir() if file.suffix in _LOG_SUFFIXES]
            yield from (file for file in files if file.is_file() and file.stat().st_size)
        except OSError:
            continue
