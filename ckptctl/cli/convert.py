"""`ckptctl convert`: convert a step to another format, or another format to a step."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    JobsOpt,
    MemoryOpt,
    OfSource,
    OnlyOpt,
    only_model,
)
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, finding_lines, line, next_line, section
from ckptctl.formatting import counted, exact_size
from ckptctl.options import Parameter, StorageOptions
from ckptctl.resharding.results import Converted

EXAMPLES = (
    "ckptctl convert /shared/ckpt/run-1234@latest /models/run-1234 --only model",
    "ckptctl convert old/model.pt /shared/ckpt/run-1234/step_1200 --world-size 8",
    "ckptctl convert /models/base /shared/ckpt/run-1234/step_0 --under model --accept-unverifiable",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 75, 77)


def convert(
    source: Annotated[
        str,
        Parameter(
            "SRC",
            "A step, as for verify; a torch.save file; safetensors: a file, an index, or a folder.",
        ),
    ],
    target: Annotated[
        str,
        Parameter(
            "DST",
            "The result, which must not exist. From a step: a name in .pt gives a "
            "torch.save file, in .safetensors one safetensors file, any other name a "
            "folder of them.",
        ),
    ],
    world_size: Annotated[
        int | None,
        Parameter("--world-size N", "Into a step: how many ranks to shard it for; 1 by default."),
    ] = None,
    only: OnlyOpt = None,
    strip: Annotated[
        str, Parameter("--strip TEXT", "Into safetensors: remove this prefix from names.")
    ] = "",
    under: Annotated[
        str,
        Parameter(
            "--under KEY",
            "From safetensors: put the tensors below this key of the state dict, as model.",
        ),
    ] = "",
    file_size: Annotated[
        int | None,
        Parameter(
            "--file-size SIZE", "Into safetensors: the largest size of a file; 5 GB by default."
        ),
    ] = None,
    memory: MemoryOpt = 256 << 20,
    jobs: JobsOpt = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    *,
    requirements: OfSource,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Convert a step to one torch.save file or to safetensors, or either of them to a step.

    The type of SRC and the ending of DST select the direction; one of them is a sharded DCP
    step. No code in a file is run. The conversion streams within --memory, compares the checksums
    of the source, and reads the result again before it is published. Safetensors have no
    checksums: without a seal they need --accept-unverifiable. With --quiet the address of the
    result is printed.
    """
    answer = ckptctl.convert(
        source,
        target,
        world_size=world_size,
        only_model=only_model(only),
        strip=strip,
        under=under,
        file_bytes=file_size,
        accept_unverifiable=accept_unverifiable,
        memory=memory,
        jobs=jobs,
        key=requirements.key,
        on_progress=lambda done, total: out.progress("written", done, total, unit="B"),
        pattern=requirements.pattern,
        grace_s=requirements.grace_s,
        storage=storage,
    )
    out.answer(
        document_of("convert", answer),
        lambda: convert_lines(answer),
        bare=(answer.target,) if answer.written else (),
    )
    return answer.exit_code


def convert_lines(answer: Converted) -> list[Line]:
    """That the folder is there, or why it is not."""
    if not answer.written:
        head = line(StyledText(answer.message, "bad"), hang=2)
        findings = section(finding_lines(answer.report.findings))
        return [head, EMPTY, *findings, *next_line(answer.next_command)]
    lines = [
        line(StyledText("converted", "good"), " ", StyledText(answer.target, "name"), solid=True),
        line("  from ", StyledText(answer.source, "name"), solid=True),
        line(f"  {answer.message}", hang=4),
        line(f"  {counted(answer.n_files, 'file')}, {exact_size(answer.n_bytes)}", hang=4),
    ]
    return [
        *lines,
        EMPTY,
        *section(finding_lines(answer.findings)),
        *next_line(answer.next_command),
    ]
