"""Check the storage from the nodes of the job, through the command that starts processes there.

`srun`, `kubectl exec`, `ssh` or any other command runs `ckptctl preflight --node-report` on
a node; what it prints is one line of JSON for each process. The reports are those of
`node` and `probing`, so several nodes are compared in one way, however they were started.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec

from ckptctl.distributed.commands import run_bounded
from ckptctl.errors import OptionError, StorageUnavailable, UsageError
from ckptctl.formats.bounded_json import decode_json
from ckptctl.options import StorageOptions
from ckptctl.preflight_checks.nodes import Compared, StorageProbe, Written, facts_of_this_node
from ckptctl.preflight_checks.results import NodeFacts
from ckptctl.starting import find_program, own_command
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import absolute_url, join_url, name_below, open_store

SCHEMA = "ckptctl.node/1"
PATIENCE = 10
"""A launcher may take so many times the timeout of the storage: it may have to wait for nodes."""
_MOST_PROCESSES = 4096
_MOST_BYTES = 1 << 20
"""The report of one process."""
_TOKEN = re.compile(r"[0-9a-f]{12}/[0-9]{1,2}")
# They are about the process that was typed, and not about those on other nodes.
_NOT_HANDED_ON = (
    "CKPTCTL_JSON",
    "CKPTCTL_QUIET",
    "CKPTCTL_REPORT",
    "CKPTCTL_LAUNCHER",
    "CKPTCTL_HEARTBEAT_KEY",
)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one process on a node saw, and prints as a line of JSON."""

    roots: tuple[NodeFacts, ...]
    """What this process found in each root, in their order."""
    written: Written | None = None
    """What this process wrote for the probe; null without one."""
    compared: Compared | None = None
    """What this process read of the probe that it was given; null without one."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that runs another one on nodes of the job, as a list of arguments.

    The last argument may be the ckptctl that is there (`kubectl exec worker-0 -- ckptctl`);
    otherwise this one is run by its path, as on a shared file system.
    """

    words: tuple[str, ...]
    timeout_s: float = 300.0

    def reports(
        self, arguments: Sequence[str], variables: Mapping[str, str], n_roots: int
    ) -> tuple[NodeReport, ...]:
        """What the processes report that `ckptctl preflight ARGUMENTS` started, of `n_roots`.

        They get `variables` where the launcher passes its environment on, as `srun` does.
        Raises `UsageError` where there is no such command, `StorageUnavailable` where it
        fails, takes too long, or no process reports.
        """
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        own = own_command("preflight", *arguments, environment={**kept, **variables})
        if os.path.basename(self.words[-1]) == "ckptctl":
            own = own._replace(words=("preflight", *arguments))
        name = self.words[0]
        if find_program(name, own.environment) is None:
            raise OptionError(
                "--launcher", f": there is no command {name!r} in the absolute folders of PATH"
            )
        try:
            words = [*self.words, *own.words]
            done = run_bounded(words, self.timeout_s, environment=own.environment)
        except TimeoutError as error:
            raise StorageUnavailable(
                f"the launcher {name} did not end within {self.timeout_s:,.0f} s; it is unknown "
                "what the nodes of the job see"
            ) from error
        code, printed, stderr = done
        reports = tuple(_reports_in(printed, n_roots))
        if code or not reports:
            lines = stderr.strip().splitlines() or ["it printed nothing on standard error"]
            last = next((line for line in lines if "error:" in line), lines[-1])
            what = "printed no report" if not code else f"ended with {code}"
            raise StorageUnavailable(
                f"the launcher {name} {what}, so it is unknown what the nodes of the job see: "
                f"{last[:400]}",
                next_command="ckptctl preflight --help",
            )
        return reports


def _reports_in(printed: str, n_roots: int) -> Iterator[NodeReport]:
    """The reports among the lines; `srun --label` and `kubectl --prefix` put words in front."""
    n_found = 0
    for line in printed.splitlines():
        start = line.find('{"schema": "' + SCHEMA)
        if start < 0 or n_found == _MOST_PROCESSES:
            continue
        n_found += 1
        try:
            report = msgspec.convert(
                decode_json(line[start:], max_bytes=_MOST_BYTES), type=NodeReport
            )
            if len(report.roots) != n_roots:
                raise ValueError("roots")
            if report.written is not None:
                probe_of(report.written.token)
        except (ValueError, msgspec.ValidationError, UsageError) as error:
            raise StorageUnavailable(
                f"a node printed a report that cannot be read ({type(error).__name__}): "
                f"{line[start : start + 200]}"
            ) from error
        yield report


def probe_of(token: str) -> Written:
    """What the probe with this token wrote; raises `UsageError` for another word."""
    if _TOKEN.fullmatch(token) is None:
        raise UsageError(f"{token!r} is not the name of a storage probe")
    return Written("", token, 0.0)


def report_from_here(
    roots: Sequence[str], step: str, probe: str | None, storage: StorageOptions
) -> dict[str, object]:
    """What this process sees of the roots, as a document.

    `step` is the URL of the chosen step, empty where there is none; it is inspected in the
    root that holds it. `probe` is the token of a probe in the first root: its files are
    compared, and files of this process are written and left for the one who asked.
    """
    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(root, storage)) for root in roots]
        report = NodeReport(
            tuple(facts_of_this_node(store, step_in(store, step)) for store in stores)
        )
        if probe is not None:
            own_probe = StorageProbe(stores[0])
            compared = own_probe.compare(probe_of(probe))
            report = replace(report, written=own_probe.write(), compared=compared)
        return {"schema": SCHEMA, **msgspec.to_builtins(report)}


def holds(store: Store, step: str) -> bool:
    """Whether a step, by its URL, is in this root."""
    return bool(step) and join_url(store.url, name_below(store.url, step)) == step


def step_in(store: Store, step: str) -> str | None:
    """The name of a step in this root; None where it is in another."""
    return name_below(store.url, step) if holds(store, step) else None


def arguments(
    roots: Sequence[str], step: str, probe: Written | None, storage: StorageOptions
) -> list[str]:
    """The arguments of the `preflight` that reports from a node; none is a secret.

    Secrets reach the storage through the environment: see `StorageOptions.variables`.
    """
    words = [absolute_url(root) for root in roots]
    words += ["--config", "none"]
    words += ["--node-report", f"{absolute_url(step)}" if step else "none"]
    words += ["--node-probe", probe.token] if probe is not None else []
    return [*words, *storage.public().arguments()]
