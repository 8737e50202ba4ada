"""`ckptctl convert`: a step as safetensors."""

from __future__ import annotations

from typing import Annotated

import typer

import ckptctl
from ckptctl.cli.documents import convert_document
from ckptctl.cli.options import GraceOpt, PatternOpt, StepArg, Storage, option, parse_size
from ckptctl.cli.output import Output
from ckptctl.cli.reshard import only_model
from ckptctl.cli.views.resharding import convert_lines

EXAMPLES = (
    "ckptctl convert /shared/ckpt/run-1234@latest /models/run-1234 --only model",
    "ckptctl convert s3://bucket/run-1234/step_1200 /models/run-1234 --file-size 2G",
)
EXIT_CODES = (0, 2, 20, 21, 22, 25, 26, 27, 75, 77)


def convert(
    step: StepArg,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="Folder to be written; it must not be there.")
    ],
    only: Annotated[
        str | None,
        option("--only", metavar="KIND", help="Leave out all train state but this: model."),
    ] = None,
    strip: Annotated[
        str,
        option("--strip", metavar="TEXT", help="Take this away from the beginning of names."),
    ] = "",
    file_size: Annotated[
        str,
        option("--file-size", metavar="SIZE", help="Begin another file before one has more."),
    ] = "5000000000",
    memory: Annotated[
        str,
        option("--memory", metavar="SIZE", help="How much memory may be used, whatever the size."),
    ] = "256M",
    jobs: Annotated[
        int | None,
        option(
            "--jobs",
            metavar="N",
            min=1,
            help="How many threads read; by default as many as is good for the storage.",
        ),
    ] = None,
    accept_unverifiable: Annotated[
        bool,
        option(
            "--accept-unverifiable",
            help="Take a step that nothing in it can prove good, as it is.",
        ),
    ] = False,
    pattern: PatternOpt = None,
    grace: GraceOpt = 600.0,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """How do the tensors of a step become safetensors, for serving?

    Whole tensors, in files of bounded size with an index; streamed, proven against the step's
    checksums, and read again before the folder appears. With --quiet its address is printed.
    """
    answer = ckptctl.convert(
        step,
        target,
        only_model=only_model(only),
        strip=strip,
        file_bytes=parse_size("file-size", file_size),
        accept_unverifiable=accept_unverifiable,
        memory=parse_size("memory", memory),
        jobs=jobs,
        on_progress=lambda done, total: out.progress("written", done, total, unit="B"),
        pattern=pattern,
        grace_s=grace,
        **storage,
    )
    out.answer(
        lambda: convert_document(answer),
        lambda: convert_lines(answer),
        bare=(answer.target,) if answer.written else (),
    )
    return answer.exit_code
