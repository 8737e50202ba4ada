"""`ckptctl pick`: the one path to resume from."""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Annotated

import ckptctl
from ckptctl.cli.documents import Document, document
from ckptctl.cli.options import AllowFreshOpt, CreateOpt, OfStep, OptionalRootOpt, RootsArg, option
from ckptctl.cli.output import Output
from ckptctl.cli.views.pick import pick_lines
from ckptctl.options import PickPolicy, StorageOptions
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
    allow_fresh: AllowFreshOpt = False,
    create: CreateOpt = False,
    detailed_exitcode: Annotated[
        bool,
        option(
            "--detailed-exitcode",
            help="Exit with 3 instead of 0 if newer steps were refused.",
        ),
    ] = False,
    printed: Annotated[
        Printed,
        option("--print", help="What to print on standard output."),
    ] = Printed.PATH,
    *,
    policy: PickPolicy,
    requirements: OfStep,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Choose the step to resume from.

    Prints one path on standard output, and on standard error why newer steps were refused. With
    --quiet standard error stays empty unless there is no usable step.
    """
    found = ckptctl.pick(
        *roots,
        optional_roots=optional_root or (),
        allow_fresh=allow_fresh,
        create=create,
        policy=policy,
        requirements=requirements,
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
