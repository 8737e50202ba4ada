"""`ckptctl verify`: inspect one step."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import ckptctl
from ckptctl.cli.documents import Document, document
from ckptctl.cli.options import LevelOpt, StepArg
from ckptctl.cli.output import Output, process_group
from ckptctl.cli.stopping import ended_by_signals
from ckptctl.cli.values import LevelChoice, level_of
from ckptctl.cli.views.verify import next_command, report_lines
from ckptctl.findings import Report
from ckptctl.options import ContentOptions, Requirements, StorageOptions

EXAMPLES = (
    "ckptctl verify /shared/ckpt/run-1234/step_1200",
    "ckptctl verify /shared/ckpt/run-1234@latest --level content --deadline 5m",
    "ckptctl verify s3://bucket/run-1234@latest --remote-checksums",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27, 75, 77, 130)


def verify(
    step: StepArg,
    level: LevelOpt = None,
    *,
    content: ContentOptions,
    requirements: Requirements,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Inspect one step and report every finding.

    Nothing is loaded, and no code of the step is run. With --quiet only the exit code is returned.
    If --subset, --deadline or Ctrl-C leave bytes out, the level that was reached is structure, and
    the report states how much is proven; a deadline ends with 22. Started by torchrun or srun, the
    processes share the bytes, and return one report and one exit code.
    """
    with ExitStack() as stack:
        group, stop = None, None
        if level is LevelChoice.CONTENT:
            group = process_group(stack, out)
            stop = stack.enter_context(ended_by_signals()) if group.size == 1 else None
        report = ckptctl.verify(
            step,
            level=level_of(level),
            content=content,
            requirements=requirements,
            storage=storage,
            stop=stop,
            group=group,
            on_progress=lambda done, total: out.progress("compared", done, total, unit="B"),
        )
        stopped = stop.exit_code if stop is not None else 0
        code = stopped or report.exit_code
        report = replace(report, exit_code=code if group is None else group.agree(code))
    out.answer(
        lambda: verify_document(report, next_command(report)),
        lambda: report_lines(report, time.time(), unicode=out.out.unicode),
    )
    return report.exit_code


def verify_document(report: Report, next_command: str | None) -> Document:
    """The document of `verify`: the report is in its field `report`."""
    return document("verify", exit_code=report.exit_code, report=report, next_command=next_command)
