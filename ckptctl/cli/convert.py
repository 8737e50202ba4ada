"""`ckptctl convert`: a step as safetensors, or a file of `torch.save` as a step."""

from __future__ import annotations

from typing import Annotated

import typer

import ckptctl
from ckptctl.cli.documents import convert_document
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    GraceOpt,
    JobsOpt,
    MemoryOpt,
    OnlyOpt,
    PatternOpt,
    Storage,
    option,
)
from ckptctl.cli.output import Output
from ckptctl.cli.reshard import only_model
from ckptctl.cli.values import parse_size
from ckptctl.cli.views.resharding import convert_lines

EXAMPLES = (
    "ckptctl convert /shared/ckpt/run-1234@latest /models/run-1234 --only model",
    "ckptctl convert s3://bucket/run-1234/step_1200 /models/run-1234 --file-size 2G",
    "ckptctl convert old/model.pt /shared/ckpt/run-1234/step_1200 --world-size 8",
)
EXIT_CODES = (0, 2, 20, 21, 22, 25, 26, 27, 75, 77)


def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A step, as for verify, or a file of torch.save."),
    ],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="Folder to be written; it must not be there.")
    ],
    world_size: Annotated[
        int | None,
        option(
            "--world-size",
            metavar="N",
            help="From a file: how many ranks the step is cut for; 1 if nobody says.",
        ),
    ] = None,
    only: OnlyOpt = None,
    strip: Annotated[
        str,
        option("--strip", metavar="TEXT", help="Take this away from the beginning of names."),
    ] = "",
    file_size: Annotated[
        str | None,
        option(
            "--file-size",
            metavar="SIZE",
            help="Begin another file of safetensors before one has more; 5 GB if nobody says.",
        ),
    ] = None,
    memory: MemoryOpt = "256M",
    jobs: JobsOpt = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    pattern: PatternOpt = None,
    grace: GraceOpt = 600.0,
    *,
    storage: Storage,
    out: Output,
) -> int:
    """How does a step become safetensors for serving, or a file of torch.save a step?

    A step: whole tensors, in files of bounded size with an index. A file: a step of sharded
    DCP that loads at any world size; nothing in the file runs, and what is neither a tensor
    nor a plain value is refused by its key. Either way streamed, proven against the source's
    checksums, and read again before it appears. With --quiet its address is printed.
    """
    answer = ckptctl.convert(
        source,
        target,
        world_size=world_size,
        only_model=only_model(only),
        strip=strip,
        file_bytes=None if file_size is None else parse_size("file-size", file_size),
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
