"""`ckptctl show`: print the contents of a step."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import ckptctl
from ckptctl.cli.documents import document
from ckptctl.cli.formatting import safe
from ckptctl.cli.options import PatternOpt, StepArg, option
from ckptctl.cli.output import Output
from ckptctl.cli.views.show import contents_lines
from ckptctl.options import StorageOptions
from ckptctl.selection.results import Contents

EXAMPLES = (
    "ckptctl show /shared/ckpt/run-1234@auto",
    "ckptctl show s3://bucket/run-1234/step_1200 --tensors | grep embed",
    "ckptctl loss train.log --resume-step $(ckptctl show /ckpt/step_1200 --print train-step)",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 75, 77)


class Printed(str, Enum):
    """The one value that `show --print` puts on standard output."""

    TRAIN_STEP = "train-step"
    TOKENS = "tokens"
    WORLD_SIZE = "world-size"


def show(
    step: StepArg,
    tensors: Annotated[
        bool,
        option(
            "--tensors",
            help="List every tensor, instead of one row for the same tensor of all layers.",
        ),
    ] = False,
    printed: Annotated[
        Printed | None,
        option(
            "--print",
            help="Print only this: the training step that the train state holds, its token count, "
            "or how many ranks saved it; nothing where it is not known.",
        ),
    ] = None,
    pattern: PatternOpt = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Show the contents of a step: tensors, sizes, ranks, and what a resume restores.

    Only the metadata is read. With --quiet the names of the tensors are printed, one a line.
    """
    contents = ckptctl.show(step, pattern=pattern, storage=storage)
    out.answer(
        lambda: document("show", contents),
        lambda: contents_lines(contents, every_tensor=tensors, width=out.out.width),
        bare=(safe(tensor.fqn) for tensor in contents.tensors)
        if printed is None
        else _values(contents, printed),
        bare_only=printed is not None,
    )
    return contents.exit_code


def _values(contents: Contents, printed: Printed) -> tuple[str, ...]:
    ranks = None if contents.world_size is None else contents.world_size.size
    values = {
        Printed.TRAIN_STEP: contents.train_step,
        Printed.TOKENS: contents.state.tokens.value,
        Printed.WORLD_SIZE: ranks,
    }
    return () if values[printed] is None else (str(values[printed]),)
