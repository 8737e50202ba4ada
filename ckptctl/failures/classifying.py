"""Classify the end of a job by its logs, exit code and scheduler state.

Reads the logs, in one pass and with bounded memory, and puts the answer together.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptctl.errors import UsageError
from ckptctl.failures.classes import CLASSES, Action, Domain, FailureClass, Restart
from ckptctl.failures.deciding import Decision, decide, hardware
from ckptctl.failures.evidence import Evidence
from ckptctl.failures.exit_codes import SCHEDULERS, evidence_of_exit, evidence_of_state
from ckptctl.failures.matching import LogReader, folded
from ckptctl.failures.results import Classification
from ckptctl.failures.suspects import suspects_in
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.storage.log_lines import logs_below, read_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack


_FINISHED = ("COMPLETED", "Completed", "Succeeded", "SUCCEEDED")
_SHOWN = 50


def classify(
    logs: Iterable[str] | str = (),
    *,
    exit_code: int | str | None = None,
    state: str | None = None,
    scheduler: str | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Classification:
    """Say whether infrastructure or the job failed, with the evidence.

    `logs` are files, folders of logs, URLs, or `-` for standard input: of all ranks, of
    the launcher, of the kernel (`dmesg -T`), of the scheduler, in any order; packed or
    not; files of torchrun's `TORCHELASTIC_ERROR_FILE` too. `exit_code` is the job's, as
    `137`, `-9` or SLURM's `0:9`; `state` what the scheduler calls the end
    (`OUT_OF_MEMORY`, `OOMKilled`); `scheduler` who said so: slurm, kubernetes, torchrun,
    ft_launcher or shell.

    Reads each log once, with bounded memory. Raises `UsageError` where nothing was given,
    and what reading a log raises.
    """
    names = [logs] if isinstance(logs, str) else [*logs]
    if not names and exit_code is None and state is None:
        raise UsageError(
            "there is neither a log nor an exit code to classify",
            next_command="ckptctl classify --help",
        )
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise UsageError(
            f"the scheduler is one of {', '.join(SCHEDULERS)}, not {scheduler!r}",
            instead="--scheduler slurm",
        )
    given = _given(exit_code, state, scheduler)
    storage = options_from(keywords, storage)
    files = [file for name in names for file in logs_below(name, storage)]
    readers = [LogReader(file) for file in files]
    counts = [0]
    found = (*folded(_readings(readers, storage, counts)), *given)
    first_failed = next((each.first_failed for each in readers if each.first_failed), None)
    decision = decide(found, first_failed)
    finished = _is_zero(exit_code) or state in _FINISHED
    return _answer(decision, found, scheduler, len(files), counts[0], finished=finished)


def _given(
    exit_code: int | str | None, state: str | None, scheduler: str | None
) -> tuple[Evidence, ...]:
    by_state = evidence_of_state(state) if state else None
    by_exit = evidence_of_exit(exit_code, scheduler) if exit_code is not None else None
    return tuple(each for each in (by_state, by_exit) if each is not None)


def _is_zero(exit_code: int | str | None) -> bool:
    return exit_code is not None and str(exit_code).strip() in ("0", "0:0")


def _readings(
    readers: Sequence[LogReader], storage: StorageOptions, counts: list[int]
) -> Iterator[tuple[LogReader, Evidence]]:
    for reader in readers:
        for block in read_blocks(reader.name, storage):
            counts[0] += len(block)
            for found in reader.take(block):
                yield reader, found


def _answer(
    decision: Decision,
    found: Sequence[Evidence],
    scheduler: str | None,
    n_files: int,
    n_lines: int,
    *,
    finished: bool,
) -> Classification:
    decisive = decision.decisive
    name = decisive.failure if decisive else "none" if finished else "unknown"
    about = CLASSES[name]
    node = _node(decisive, decision.agreeing)
    return Classification(
        failure=name,
        domain=about.domain,
        action=Action(decisive.action) if decisive and decisive.action else about.action,
        restart=Restart(decisive.restart) if decisive and decisive.restart else about.restart,
        confidence="medium" if name == "none" else decision.confidence,
        message=_message(about, decisive, decision, node),
        advice=about.advice,
        node=node,
        device=decisive.device if decisive else None,
        rank=decisive.rank if decisive else None,
        suspects=suspects_in(hardware(decision)),
        evidence=((decisive, *decision.agreeing) if decisive else ())[:_SHOWN],
        consequences=decision.consequences[:_SHOWN],
        others=decision.others[:_SHOWN],
        survived=tuple(each for each in found if each.survived)[:_SHOWN],
        n_files=n_files,
        n_lines=n_lines,
        next_command=_next(about, decisive, node, scheduler, found),
    )


def _node(decisive: Evidence | None, agreeing: Sequence[Evidence]) -> str | None:
    if decisive is None or decisive.host:
        return decisive.host if decisive else None
    same = (each.host for each in agreeing if each.rank == decisive.rank and each.host)
    return next(same, None)


def _message(
    about: FailureClass, decisive: Evidence | None, decision: Decision, node: str | None
) -> str:
    if decisive is None:
        if decision.consequences:
            return "only consequences are in these logs: another rank or the kernel knows the cause"
        return about.means
    where = ", ".join(
        each
        for each in (
            node,
            decisive.device,
            f"rank {decisive.rank}" if decisive.rank is not None else None,
        )
        if each
    )
    return f"{decisive.says} ({where})" if where else decisive.says


def _next(
    about: FailureClass,
    decisive: Evidence | None,
    node: str | None,
    scheduler: str | None,
    found: Sequence[Evidence],
) -> str | None:
    if decisive is None or about.domain is Domain.NONE:
        return None
    if about.name == "infra-node" and node:
        reason = shlex.quote(decisive.says)
        if scheduler == "kubernetes" or any(e.rule.startswith("kubernetes.") for e in found):
            return f"kubectl cordon {shlex.quote(node)}"
        if scheduler == "slurm" or any(e.rule.startswith("slurm.") for e in found):
            return f"scontrol update nodename={shlex.quote(node)} state=drain reason={reason}"
    if about.action is Action.FALL_BACK or about.domain in (Domain.INFRASTRUCTURE, Domain.STOPPED):
        return "ckptctl scan ROOT" if about.action is Action.FALL_BACK else "ckptctl pick ROOT"
    return None
