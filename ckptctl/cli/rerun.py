"""`ckptctl rerun`: replay a suspicious step to find out whether the hardware is at fault."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from ckptctl.cli.options import only
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line
from ckptctl.options import Parameter, StorageOptions
from ckptctl.rerun.deciding import Comparison, ValueOrigin
from ckptctl.rerun.rerunning import LoggedLoss, ReplayResult, Rerun, RerunOptions
from ckptctl.rerun.rerunning import rerun as lead_replays
from ckptctl.supervisor.nodes import NodeOptions

EXAMPLES = (
    "ckptctl rerun --root ckpt --step 12 --log log --other-nodes c,d -- ./job {root} {node_list}",
    "ckptctl rerun --root ckpt --step 1207 --log train.log --dry-run -- ./train.sh {root}",
)
EXIT_CODES = (0, 2, 10, 11, 31, 34, 75, 77, 93)


def rerun(
    root: Annotated[
        str,
        Parameter(
            "--root ROOT", "Folder or URL with the steps of the run. It is read and never written."
        ),
    ],
    command: Annotated[
        list[str] | None,
        Parameter(
            "CMD...",
            "The command of the job, after --. {root} becomes a copy of the root, {step} the "
            "step to resume from, {steps} how many steps to train and {last} the last one, "
            "{node_list} the nodes with commas and {nodes} their number, {log_dir} a folder for "
            "logs that the job writes besides its output.",
        ),
    ] = None,
    *,
    options: RerunOptions,
    nodes: Annotated[NodeOptions, only("nodes", "hosts_file", "exclude_command")],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Replay a suspicious step on the same and on other nodes, to find faulty hardware.

    The steps before a NaN or a spike are trained again from an older step, on copies of it, and
    the losses are compared bit for bit with the log and with each other. Ends with 0 if the
    value is transient (it does not repeat), with 34 if it is persistent on the hardware of
    these nodes, with 93 if it is the job's own (other nodes repeat it), and with 31 if the
    replays do not decide. The job must print its loss or write it to {log_dir}.
    """
    options = replace(options, nodes=nodes)
    found = lead_replays(command or (), root, options, tell=out.tell, storage=storage)
    out.answer(document_of("rerun", found), lambda: rerun_lines(found))
    return found.exit_code


def rerun_lines(found: Rerun) -> list[Line]:
    """The answer, each replay in a line, and the losses side by side."""
    is_good = found.answer in (None, ValueOrigin.TRANSIENT)
    lines = [line(StyledText(found.message, "good" if is_good else "bad"), hang=2)]
    if found.suspects:
        excluded = "excluded" if found.excluded else "not excluded"
        lines.append(line(f"  at fault: {', '.join(found.suspects)} ({excluded})", hang=4))
    steps = f"{found.from_step + 1} to {found.last_step}"
    lines.append(line(f"  replayed: steps {steps}, on copies of {found.root}", hang=4))
    if not found.root_unchanged:
        lines.append(line(f"  {found.root} was changed meanwhile", hang=4))
    for number, replay in enumerate(found.replays, 1):
        about = _about(replay) if found.answer else shlex.join(replay.command)
        on = f"{replay.nodes.value} nodes, {', '.join(replay.names)}"
        lines.append(line(f"  replay {number}, {on}: {about}", hang=4))
    return [*lines, *_table(found), *next_line(found.next_command)]


def _about(replay: ReplayResult) -> str:
    code = "" if not replay.exit_code else f"ended with {replay.exit_code}; "
    return code + ("logged no loss" if replay.compared is None else _compared(replay.compared))


def _compared(found: Comparison) -> str:
    """How a replay compares with the first record."""
    first = found.first
    if first is None:
        return f"all {found.n_values} values equal those of the log"
    name = f"{first.name} of {first.log}" if first.log else first.name
    size = "one is not finite" if first.relative is None else f"by {first.relative:.1e}"
    return f"differs from the log first at step {first.step}, {name}, {size}"


def _table(found: Rerun) -> Iterator[Line]:
    """The losses of the log and of the replays, a row for each step."""
    runs = [("log", found.losses)]
    runs += [
        (f"replay {n}", replay.losses) for n, replay in enumerate(found.replays, 1) if replay.losses
    ]
    if len(runs) < 2:
        return
    columns = [_column(title, losses, found) for title, losses in runs]
    numbers = ["step", *(str(step) for step in _steps(found))]
    widths = [max(map(len, column)) for column in (numbers, *columns)]
    yield EMPTY
    for cells in zip(numbers, *columns, strict=True):
        yield line(
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        )


def _steps(found: Rerun) -> list[int]:
    logged = {loss.step for loss in found.losses}
    logged |= {loss.step for replay in found.replays for loss in replay.losses}
    return sorted(number for number in logged if number > found.from_step)


def _column(title: str, losses: tuple[LoggedLoss, ...], found: Rerun) -> list[str]:
    by_step = {loss.step: loss.loss for loss in losses}
    cells = ["-" if number not in by_step else repr(by_step[number]) for number in _steps(found)]
    return [title, *cells]
