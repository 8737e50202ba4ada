"""`ckptctl pick`: the one path to resume from."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Annotated

import ckptctl
from ckptctl.cli.documents import Document, document
from ckptctl.cli.options import (
    AcceptUnverifiableOpt,
    AllowFreshOpt,
    BeforeOpt,
    CreateOpt,
    GraceOpt,
    KeyFileOpt,
    LevelOpt,
    MarksOpt,
    MaxFallbackOpt,
    OptionalRootOpt,
    PatternOpt,
    RequireOpt,
    RequireSealOpt,
    RootsArg,
    SavedWorldSizeOpt,
    SkipOpt,
    WeightsOpt,
    WorldSizeOpt,
    option,
)
from ckptctl.cli.output import Output
from ckptctl.cli.values import level_of, parse_kinds, parse_steps, seal_key
from ckptctl.cli.views.pick import pick_lines
from ckptctl.options import StorageOptions
from ckptctl.selection.results import Answer, Pick

EXAMPLES = (
    'CKPT=$(ckptctl pick /shared/ckpt/run-1234) && torchrun train.py --resume "$CKPT"',
    "ckptctl pick s3://bucket/run-1234 --require model,optimizer --before 1400",
)
EXIT_CODES = (0, 2, 3, 10, 11, 75, 77)

_FELL_BACK = 3


class Printed(str, Enum):
    """What `pick` puts on standard output."""

    PATH = "path"
    STEP = "step"


def pick(
    roots: RootsArg,
    optional_root: OptionalRootOpt = None,
    level: LevelOpt = None,
    require: RequireOpt = None,
    allow_missing_state: WeightsOpt = False,
    accept_unverifiable: AcceptUnverifiableOpt = False,
    before: BeforeOpt = None,
    skip: SkipOpt = None,
    max_fallback: MaxFallbackOpt = 2,
    allow_fresh: AllowFreshOpt = False,
    create: CreateOpt = False,
    detailed_exitcode: Annotated[
        bool,
        option(
            "--detailed-exitcode",
            help="Exit with 3 instead of 0 where newer steps were refused.",
        ),
    ] = False,
    printed: Annotated[
        Printed,
        option("--print", help="What to print on standard output."),
    ] = Printed.PATH,
    world_size: WorldSizeOpt = None,
    saved_world_size: SavedWorldSizeOpt = None,
    pattern: PatternOpt = None,
    grace: GraceOpt = 600.0,
    require_seal: RequireSealOpt = False,
    key_file: KeyFileOpt = None,
    marks: MarksOpt = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Choose the step to resume from.

    Prints one path on standard output, and on standard error why newer steps were
    refused. With --quiet standard error stays empty unless there is no such step.
    """
    found = ckptctl.pick(
        *roots,
        optional_roots=optional_root or (),
        level=level_of(level),
        require=parse_kinds(require),
        allow_missing_state=allow_missing_state,
        accept_unverifiable=accept_unverifiable,
        before=before,
        skip=parse_steps(skip),
        max_fallback=max_fallback,
        allow_fresh=allow_fresh,
        create=create,
        world_size=world_size,
        saved_world_size=saved_world_size,
        pattern=pattern,
        grace_s=grace,
        require_seal=require_seal,
        key=seal_key(key_file),
        marks=marks,
        storage=storage,
    )
    fell_back = detailed_exitcode and found.answer is Answer.FELL_BACK
    exit_code = _FELL_BACK if fell_back else found.exit_code
    answer = partial(pick_document, found, exit_code)
    out.save(answer)
    if out.as_json:
        out.document(answer())
    else:
        if out.talks or found.exit_code:
            out.lines(pick_lines(found), to=out.err)
        out.bare(_taken(found, printed))
    return exit_code


def pick_document(found: Pick, exit_code: int) -> Document:
    """The document of `pick`; `path` and `step` are null where nothing was chosen."""
    chosen = found.chosen
    return document(
        "pick",
        found,
        exit_code=exit_code,
        path=chosen.url if chosen else None,
        step=chosen.number if chosen else None,
    )


def _taken(found: Pick, printed: Printed) -> tuple[str, ...]:
    if found.chosen is None:
        return ()
    return (found.path,) if printed is Printed.PATH else (str(found.step),)
