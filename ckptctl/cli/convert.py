"""`ckptctl convert`: a step in another format, or another format as a step."""

from __future__ import annotations

from typing import Annotated

import typer

import ckptctl
from ckptctl.cli.documents import document
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    GraceOpt,
    JobsOpt,
    KeyFileOpt,
    MemoryOpt,
    OnlyOpt,
    PatternOpt,
    option,
)
from ckptctl.cli.output import Output
from ckptctl.cli.reshard import only_model
from ckptctl.cli.values import parse_size, seal_key
from ckptctl.cli.views.resharding import convert_lines
from ckptctl.options import StorageOptions

EXAMPLES = (
    "ckptctl convert /shared/ckpt/run-1234@latest /models/run-1234 --only model",
    "ckptctl convert old/model.pt /shared/ckpt/run-1234/step_1200 --world-size 8",
    "ckptctl convert /models/base /shared/ckpt/run-1234/step_0 --under model --accept-unverifiable",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 75, 77)


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A step, as for verify; a file of torch.save; safetensors: a file, an index, or a "
            "folder.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="What is to be written; it must not be there. From a step: a name in .pt is a "
            "file of torch.save, in .safetensors one such file, any other a folder of them.",
        ),
    ],
    world_size: Annotated[
        int | None,
        option(
            "--world-size",
            metavar="N",
            help="Into a step: how many ranks it is cut for; 1 if nobody says.",
        ),
    ] = None,
    only: OnlyOpt = None,
    strip: Annotated[
        str,
        option(
            "--strip",
            metavar="TEXT",
            help="Into safetensors: take this away from the beginning of names.",
        ),
    ] = "",
    under: Annotated[
        str,
        option(
            "--under",
            metavar="KEY",
            help="From safetensors: put the tensors below this key of the state dict, as model.",
        ),
    ] = "",
    file_size: Annotated[
        str | None,
        option(
            "--file-size",
            metavar="SIZE",
            help="Into safetensors: begin another file before one has more; 5 GB if nobody says.",
        ),
    ] = None,
    memory: MemoryOpt = "256M",
    jobs: JobsOpt = None,
    key_file: KeyFileOpt = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    pattern: PatternOpt = None,
    grace: GraceOpt = 600.0,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Convert a step to one torch.save file or to safetensors, or either of them to a step.

    What SRC is, and how DST's name ends, say which way; one of both is a step of sharded DCP.
    Nothing in a file runs. Streamed within --memory, proven against the source's checksums, and
    read again before it appears. Safetensors carry none: without a seal they are taken with
    --accept-unverifiable. With --quiet the address of the result is printed.
    """
    answer = ckptctl.convert(
        source,
        target,
        world_size=world_size,
        only_model=only_model(only),
        strip=strip,
        under=under,
        file_bytes=None if file_size is None else parse_size("file-size", file_size),
        accept_unverifiable=accept_unverifiable,
        memory=parse_size("memory", memory),
        jobs=jobs,
        key=seal_key(key_file),
        on_progress=lambda done, total: out.progress("written", done, total, unit="B"),
        pattern=pattern,
        grace_s=grace,
        storage=storage,
    )
    out.answer(
        lambda: document("convert", answer),
        lambda: convert_lines(answer),
        bare=(answer.target,) if answer.written else (),
    )
    return answer.exit_code
