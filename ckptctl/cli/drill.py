"""`ckptctl drill`: inject faults into your own job, on a copy of its newest step."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

from ckptctl.cli.options import only
from ckptctl.cli.output import Output, document_of, replace_text
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line
from ckptctl.drill.drilling import DrillOptions
from ckptctl.drill.drilling import drill as run_drill
from ckptctl.drill.trial import Drilled, as_markdown, facts, rows
from ckptctl.options import Parameter, StorageOptions
from ckptctl.supervisor.nodes import NodeOptions

EXAMPLES = (
    "ckptctl drill --root /shared/ckpt/run -- torchrun --nproc-per-node 8 train.py --root {root}",
    "ckptctl drill --root ckpt --root-env CKPT_DIR --fault rank-stopped -- ./train.sh",
)
EXIT_CODES = (0, 2, 10, 11, 33, 75, 77)


def drill(
    root: Annotated[
        str,
        Parameter(
            "--root ROOT",
            "Folder or URL with the steps of the run. It is read and never written.",
        ),
    ],
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
    table = rows(found)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        line("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
        for cells in table
    ]
    problems = [
        line(f"{trial.fault}: {problem}", hang=2)
        for trial in found.trials
        for problem in trial.problems
    ]
    return [
        line(StyledText(found.message, "bad" if found.exit_code else "good"), hang=2),
        *(line(f"  {name}: {text}", hang=4) for name, text in facts(found)),
        EMPTY,
        *lines,
        EMPTY,
        *problems,
        line(f"report: {work}/report.md"),
        *next_line(found.next_command),
    ]
