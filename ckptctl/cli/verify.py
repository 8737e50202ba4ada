"""`ckptctl verify`: can one step be trusted?"""

from __future__ import annotations

import time

import ckptctl
from ckptctl.cli.documents import verify_document
from ckptctl.cli.options import (
    GraceOpt,
    KeyFileOpt,
    LevelChoice,
    MarksOpt,
    PatternOpt,
    RequireOpt,
    RequireSealOpt,
    SavedWorldSizeOpt,
    StepArg,
    Storage,
    VerifyLevelOpt,
    WorldSizeOpt,
    parse_kinds,
    seal_key,
)
from ckptctl.cli.output import Output
from ckptctl.cli.views.verify import next_command, report_lines
from ckptctl.model import Level

EXAMPLES = (
    "ckptctl verify /shared/ckpt/run-1234/step_1200",
    "ckptctl verify s3://bucket/run-1234@latest --level structure",
)
EXIT_CODES = (0, 2, 20, 21, 22, 23, 24, 25, 26, 27, 75, 77)


def verify(
    step: StepArg,
    level: VerifyLevelOpt = LevelChoice.LISTING,
    require: RequireOpt = None,
    world_size: WorldSizeOpt = None,
    saved_world_size: SavedWorldSizeOpt = None,
    pattern: PatternOpt = None,
    grace: GraceOpt = 600.0,
    require_seal: RequireSealOpt = False,
    key_file: KeyFileOpt = None,
    marks: MarksOpt = None,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """Can this step be trusted?

    Nothing is loaded, and no code of the step runs. With --quiet only the exit code answers.
    """
    report = ckptctl.verify(
        step,
        level=Level(level.value),
        require=parse_kinds(require),
        world_size=world_size,
        saved_world_size=saved_world_size,
        pattern=pattern,
        grace_s=grace,
        require_seal=require_seal,
        key=seal_key(key_file),
        marks=marks,
        **storage,
    )
    out.answer(
        lambda: verify_document(report, next_command(report)),
        lambda: report_lines(report, time.time(), unicode=out.out.unicode),
    )
    return report.exit_code
