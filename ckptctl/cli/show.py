"""`ckptctl show`: print the contents of a step."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.documents import document
from ckptctl.cli.formatting import safe
from ckptctl.cli.options import PatternOpt, StepArg, option
from ckptctl.cli.output import Output
from ckptctl.cli.views.show import contents_lines
from ckptctl.options import StorageOptions

EXAMPLES = (
    "ckptctl show /shared/ckpt/run-1234@auto",
    "ckptctl show s3://bucket/run-1234/step_1200 --tensors | grep embed",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 75, 77)


def show(
    step: StepArg,
    tensors: Annotated[
        bool,
        option(
            "--tensors",
            help="List every tensor, instead of the model's alone with one row for all layers.",
        ),
    ] = False,
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
        bare=(safe(tensor.fqn) for tensor in contents.tensors),
    )
    return contents.exit_code
