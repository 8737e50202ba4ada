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
from typing import TYPE_CHECKING, TextIO, TypedDict

from ckptctl.errors import OptionError, StorageUnavailable, UsageError
from ckptctl.formats.bounded_json import decode_json
from ckptctl.options import StorageOptions
from ckptctl.preflight_checks.nodes import Compared, StorageProbe, Written, facts_of_this_node
from ckptctl.preflight_checks.results import NodeFacts
from ckptctl.starting import OwnCommand, find_program, own_command
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import absolute_url, join_url, name_below, open_store

if TYPE_CHECKING:
    from ckptctl.distributed.commands import Finished

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
NODE_SECRETS = "CKPTCTL_NODE_SECRETS"
"""The variable with the storage options that may be secrets, as a JSON object."""
_MOST_SECRETS = 1 << 20


class _Probed(TypedDict, total=False):
    written: Written
    """What this process wrote for the probe."""
    compared: Compared
    """What this process read of the probe that it was given."""


class NodeDocument(_Probed):
    """What one process on a node prints."""

    roots: tuple[NodeFacts, ...]
    """What this process found in each root, in their order."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one process on a node saw: of each root in their order, and of a probe."""

    facts: tuple[NodeFacts, ...]
    written: Written | None = None
    compared: Compared | None = None


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that runs another one on nodes of the job, as a list of arguments.

    The last argument may be the ckptctl that is there (`kubectl exec worker-0 -- ckptctl`);
    otherwise this one is run by its path, as on a shared file system.
    """

    words: tuple[str, ...]
    timeout_s: float = 300.0

    def reports(
        self, arguments: Sequence[str], secrets: Mapping[str, object], n_roots: int
    ) -> tuple[NodeReport, ...]:
        """What the processes report that `ckptctl preflight ARGUMENTS` started, of `n_roots`.

        The storage options in `secrets` reach them in the environment and on standard input.
        Raises `UsageError` where there is no such command, `StorageUnavailable` where it
        fails, takes too long, or no process reports.
        """
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        own = own_command("preflight", *arguments, environment=environment)
        if os.path.basename(self.words[-1]) == "ckptctl":
            own = own._replace(words=("preflight", *arguments))
        code, printed, stderr = _run(self.words, own, secrets, self.timeout_s)
        found = tuple(_reports_in(printed, n_roots))
        if code or not found:
            lines = stderr.strip().splitlines() or ["it printed nothing on standard error"]
            last = next((each for each in lines if "error:" in each), lines[-1])
            what = "printed no report" if not code else f"ended with {code}"
            raise StorageUnavailable(
                f"the launcher {self.words[0]} {what}, so it is unknown what the nodes of the "
                f"job see: {last[:400]}",
                next_command="ckptctl preflight --help",
            )
        return found


def _run(
    launcher: Sequence[str], own: OwnCommand, secrets: Mapping[str, object], timeout_s: float
) -> Finished:
    from ckptctl.distributed.commands import run_bounded

    if find_program(launcher[0], own.environment) is None:
        raise OptionError(
            "--launcher", f": there is no command {launcher[0]!r} in the absolute folders of PATH"
        )
    try:
        return run_bounded(
            [*launcher, *own.words],
            timeout_s,
            data=_as_line(secrets).encode(),
            environment=with_secrets(own.environment, secrets),
        )
    except TimeoutError as error:
        raise StorageUnavailable(
            f"the launcher {launcher[0]} did not end within {timeout_s:,.0f} s; it is unknown what "
            "the nodes of the job see"
        ) from error


def with_secrets(environment: Mapping[str, str], secrets: Mapping[str, object]) -> dict[str, str]:
    """The environment with the storage options that no argument of a process may hold."""
    return {**environment, **({NODE_SECRETS: _as_line(secrets)} if secrets else {})}


def _as_line(secrets: Mapping[str, object]) -> str:
    import json

    return f"{json.dumps(secrets)}\n" if secrets else ""


def with_handed_on(
    storage: StorageOptions, names: Sequence[str], environment: Mapping[str, str], given: TextIO
) -> StorageOptions:
    """The storage options with those `names` that the caller put where no other user reads them.

    `srun` passes on the environment and standard input, `ssh` and `kubectl exec -i` the input
    only. Raises `UsageError` where neither arrived.
    """
    text = environment.get(NODE_SECRETS) or given.readline(_MOST_SECRETS)
    try:
        secrets = decode_json(text, max_bytes=_MOST_SECRETS)
    except ValueError:
        secrets = None
    if not isinstance(secrets, dict) or not secrets.keys() >= {*names}:
        raise UsageError(
            f"the storage options {', '.join(names)} did not arrive: the launcher passes on "
            "neither the environment nor standard input (kubectl exec needs -i); set the variables "
            "of the storage's client on the nodes instead"
        )
    chosen = {name: secrets[name] for name in names}
    return replace(storage, storage_options={**(storage.storage_options or {}), **chosen})


def _reports_in(printed: str, n_roots: int) -> Iterator[NodeReport]:
    """The reports among the lines; `srun --label` and `kubectl --prefix` put words in front."""
    n_found = 0
    for line in printed.splitlines():
        start = line.find('{"schema": "' + SCHEMA)
        if start < 0 or n_found == _MOST_PROCESSES:
            continue
        n_found += 1
        try:
            report = report_of(decode_json(line[start:], max_bytes=_MOST_BYTES))
            if len(report.facts) != n_roots:
                raise ValueError("roots")
        except (ValueError, TypeError, KeyError) as error:
            raise StorageUnavailable(
                f"a node printed a report that cannot be read ({type(error).__name__}): "
                f"{line[start : start + 200]}"
            ) from error
        yield report


def report_of(document: object) -> NodeReport:
    """The report in a document; raises `ValueError`, `TypeError` or `KeyError` for another one."""
    if not isinstance(document, dict):
        raise TypeError("a report is a JSON object")
    roots = document["roots"]
    if not isinstance(roots, list):
        raise TypeError("roots")
    written, compared = document.get("written"), document.get("compared")
    return NodeReport(
        tuple(_typed(NodeFacts, one) for one in roots),
        None if written is None else _written(written),
        None if compared is None else _compared(compared),
    )


def _typed(of: type[NodeFacts], given: object) -> NodeFacts:
    """The facts, each of the type that it has in facts of this process."""
    if not isinstance(given, dict):
        raise TypeError("facts")
    kept = of(host=str(given["host"])[:256])
    kinds = {"mount": str, "error": str, "free": int}
    for name in of.__dataclass_fields__:
        value = given.get(name)
        kind = kinds.get(name, type(getattr(kept, name)))
        if name == "host" or value is None:
            continue
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(name)
        kept = replace(kept, **{name: value[:4000] if isinstance(value, str) else value})  # type: ignore[arg-type]
    return kept


def _written(given: object) -> Written:
    if not isinstance(given, dict):
        raise TypeError("written")
    error = given["error"]
    return replace(
        probe_of(str(given["token"])),
        host=str(given["host"])[:256],
        seconds=float(given["seconds"]),
        error=None if error is None else str(error)[:4000],
        error_code=int(given["error_code"]),
    )


def _compared(given: object) -> Compared:
    if not isinstance(given, dict) or not isinstance(given["wrong"], list):
        raise TypeError("compared")
    error = given["error"]
    return Compared(
        host=str(given["host"])[:256],
        n_bytes=int(given["n_bytes"]),
        seconds=float(given["seconds"]),
        wrong=tuple(str(one)[:400] for one in given["wrong"][:100]),
        error=None if error is None else str(error)[:4000],
        error_code=int(given["error_code"]),
    )


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
    from dataclasses import asdict

    with ExitStack() as stack:
        stores = [stack.enter_context(open_store(root, storage)) for root in roots]
        facts = [facts_of_this_node(one, step_in(one, step)) for one in stores]
        document: dict[str, object] = {"schema": SCHEMA, "roots": [asdict(one) for one in facts]}
        if probe is not None:
            mine = StorageProbe(stores[0])
            document["compared"] = asdict(mine.compare(probe_of(probe)))
            document["written"] = asdict(mine.write())
        return document


def holds(store: Store, step: str) -> bool:
    """Whether a step, by its URL, is in this root."""
    return bool(step) and join_url(store.url, name_below(store.url, step)) == step


def step_in(store: Store, step: str) -> str | None:
    """The name of a step in this root; None where it is in another."""
    return name_below(store.url, step) if holds(store, step) else None


def arguments(
    roots: Sequence[str], step: str, probe: Written | None, storage: StorageOptions
) -> list[str]:
    """The arguments of the `preflight` that reports from a node; none is a secret."""
    words = [absolute_url(root) for root in roots]
    words += ["--config", "none"]
    words += ["--node-report", f"{absolute_url(step)}" if step else "none"]
    words += ["--node-probe", probe.token] if probe is not None else []
    secrets = storage.secrets()
    words += ["--node-secrets", ",".join(secrets)] if secrets else []
    return [*words, *storage.public().arguments()]
