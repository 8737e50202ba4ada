"""`ckptctl drill` and `rerun`: run the job itself on copies of a step."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated

from ckptctl.cli.options import only
from ckptctl.cli.output import Output, document_of, replace_text
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line, table_lines
from ckptctl.drill.drilling import Drilled, DrillOptions, as_markdown, facts, rows
from ckptctl.drill.drilling import drill as run_drill
from ckptctl.options import Parameter, StorageOptions
from ckptctl.rerun.deciding import ValueOrigin
from ckptctl.rerun.rerunning import ReplayResult, Rerun, RerunOptions
from ckptctl.rerun.rerunning import rerun as lead_replays
from ckptctl.supervisor.nodes import NodeOptions

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "drill": (
        "ckptctl drill --root /ckpt/run -- torchrun --nproc-per-node 8 train.py --root {root}",
        "ckptctl drill --root ckpt --root-env CKPT_DIR --fault rank-stopped -- ./train.sh",
    ),
    "rerun": (
        "ckptctl rerun --root run --step 9 --log log --other-nodes c,d -- ./job {root} {node_list}",
        "ckptctl rerun --root ckpt --step 1207 --log train.log --dry-run -- ./train.sh {root}",
    ),
}
EXIT_CODES: Mapping[str, tuple[int, ...]] = {
    "drill": (0, 2, 10, 11, 33, 75, 77),
    "rerun": (0, 2, 10, 11, 31, 34, 75, 77, 93),
}

ReadRootOpt = Annotated[
    str,
    Parameter(
        "--root ROOT", "Folder or URL with the steps of the run. It is read and never written."
    ),
]


def drill(
    root: ReadRootOpt,
    command: Annotated[
        list[str] | None,
        Parameter(
            "CMD...",
            "The command of the job, after --. {root} becomes the copy of the root, and "
            "{step} the step to resume from.",
        ),
    ] = None,
    *,
    options: DrillOptions,
    nodes: Annotated[NodeOptions, only("nodes", "world_sizes", "hosts_file")],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Inject faults into your own job, on a copy of its newest step, and grade how it survives.

    For each fault the step is copied (reflinks or real copies, never hard links), and the job is
    run on the copy by `ckptctl run`. After the fault RB-7 resumes the job, and its loss is
    compared with that of a run without a fault. The job needs no change; it must save steps,
    print its loss, and resume by itself or by {step}. With --nodes a node on which a rank hangs
    is left out, and with --world-sizes the job is resumed with fewer ranks; no node is drained.
    Writes report.md. Ends with 33 where the job does not survive a fault. Ctrl-C and SIGTERM end
    everything that was started and remove the copies.
    """
    options = replace(options, nodes=nodes)
    found = run_drill(command or (), root, options, tell=out.tell, storage=storage)
    replace_text(os.path.join(options.work, "report.md"), as_markdown(found))
    out.answer(document_of("drilled", found), lambda: drilled_lines(found, options.work))
    return found.exit_code


def drilled_lines(found: Drilled, work: str) -> list[Line]:
    """The grades as a table, and where the reports are."""
    problems = [
        line(f"{trial.fault}: {problem}", hang=2)
        for trial in found.trials
        for problem in trial.problems
    ]
    return [
        line(StyledText(found.message, "bad" if found.exit_code else "good"), hang=2),
        *(line(f"  {name}: {text}", hang=4) for name, text in facts(found)),
        EMPTY,
        *table_lines(rows(found)),
        EMPTY,
        *problems,
        line(f"report: {work}/report.md"),
        *next_line(found.next_command),
    ]


def rerun(
    root: ReadRootOpt,
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
    """How a replay ended, and how it compares with the first record."""
    ended = "" if not replay.exit_code else f"ended with {replay.exit_code}; "
    if replay.compared is None:
        return f"{ended}logged no loss"
    first = replay.compared.first
    if first is None:
        return f"{ended}all {replay.compared.n_values} values equal those of the log"
    name = f"{first.name} of {first.log}" if first.log else first.name
    size = "one is not finite" if first.relative is None else f"by {first.relative:.1e}"
    return f"{ended}differs from the log first at step {first.step}, {name}, {size}"


def _table(found: Rerun) -> Iterator[Line]:
    runs = {"log": found.losses} | {
        f"replay {number}": replay.losses
        for number, replay in enumerate(found.replays, 1)
        if replay.losses
    }
    if len(runs) < 2:
        return
    columns = [{loss.step: repr(loss.loss) for loss in losses} for losses in runs.values()]
    steps = sorted({step for column in columns for step in column if step > found.from_step})
    yield EMPTY
    yield from table_lines(
        [
            ("step", *runs),
            *((str(step), *(column.get(step, "-") for column in columns)) for step in steps),
        ]
    )
