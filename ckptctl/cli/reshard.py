"""`ckptctl reshard`: rewrite a step for another world size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import ckptctl
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    JobsOpt,
    MemoryOpt,
    OfSource,
    OnlyOpt,
    StepArg,
    only_model,
)
from ckptctl.cli.output import Output, document_of, process_group
from ckptctl.cli.rendering import EMPTY, Line, StyledText, finding_lines, line, next_line, section
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.formatting import command_line, counted, exact_size, size
from ckptctl.options import Parameter, StorageOptions
from ckptctl.resharding.results import RankShare, Reshard

EXAMPLES = (
    "ckptctl reshard /shared/ckpt/run-1234@latest /shared/ckpt/run-1235/step_1200 --world-size 24",
    "ckptctl reshard s3://bucket/run/step_1200 /tmp/step_1200 --world-size 8 --only model",
    "torchrun --nproc-per-node 8 --no-python ckptctl reshard SRC DST --world-size 24 --apply",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 75, 77)


def reshard(
    step: StepArg,
    target: Annotated[str, Parameter("DST", "Path or URL of the new step; it must not exist.")],
    world_size: Annotated[
        int | None, Parameter("--world-size N", "How many ranks to shard the new step for.", min=1)
    ] = None,
    only: OnlyOpt = None,
    apply: Annotated[
        bool, Parameter("--apply", "Write the new step; without it only the plan is printed.")
    ] = False,
    memory: MemoryOpt = 256 << 20,
    jobs: JobsOpt = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    *,
    requirements: OfSource,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Rewrite a step for another world size in constant memory.

    Prints the plan; with --apply the new step is written aside, verified, sealed and published.
    Under torchrun or srun the processes share the files. After an interruption the same call
    continues. With --quiet the address of the new step is printed when it is published.
    """
    with ExitStack() as stack:
        group = process_group(stack, out) if apply else ProcessGroup()
        answer = ckptctl.reshard(
            step,
            target,
            world_size=world_size,
            only_model=only_model(only),
            apply=apply,
            accept_unverifiable=accept_unverifiable,
            memory=memory,
            jobs=jobs,
            key=requirements.key,
            group=group,
            on_progress=lambda done, total: out.progress("written", done, total, unit="B"),
            pattern=requirements.pattern,
            grace_s=requirements.grace_s,
            storage=storage,
        )
        answer = replace(answer, exit_code=group.agree(answer.exit_code))
    if not apply and not answer.exit_code:
        answer = replace(answer, next_command=command_line("reshard", step, target, "--apply"))
    out.answer(
        document_of("reshard", answer),
        lambda: reshard_lines(answer),
        bare=(answer.target,) if answer.written else (),
    )
    return answer.exit_code


_SHOWN = 16
"""Of more shard files than so many, the first and the last few are shown."""


def reshard_lines(answer: Reshard) -> list[Line]:
    """The plan, or that the new step is there, or why it is not."""
    if answer.exit_code:
        head = line(StyledText(answer.message, "bad"), hang=2)
        findings = section(finding_lines(answer.report.findings))
        return [head, EMPTY, *findings, *next_line(answer.next_command)]
    if answer.written:
        head = line(
            StyledText("resharded", "good"), " ", StyledText(answer.target, "name"), solid=True
        )
    else:
        head = line(
            StyledText("plan", "strong"), " ", StyledText(answer.target, "name"), solid=True
        )
    return [
        head,
        line(f"  {_ranks(answer)}", hang=4),
        line(f"  {_contents(answer)}", hang=4),
        line(f"  {counted(answer.n_files, 'file')}, {exact_size(answer.n_bytes)}", hang=4),
        *_state(answer),
        EMPTY,
        *section(_shares(answer)),
        *section(finding_lines(answer.findings)),
        *next_line(answer.next_command),
    ]


def _ranks(answer: Reshard) -> str:
    saved = answer.saved_world_size
    before = "an unknown number of ranks" if saved is None else counted(saved, "rank")
    after = counted(answer.world_size, "rank")
    return f"from {answer.source}, saved by {before}, for {after}"


def _contents(answer: Reshard) -> str:
    others = counted(answer.n_bytes_entries, "other entry", "other entries")
    return (
        f"{counted(answer.n_tensors, 'tensor')}: {answer.n_cut:,} sharded, "
        f"{answer.n_whole:,} whole; {others}"
    )


def _state(answer: Reshard) -> Iterator[Line]:
    if not answer.written:
        yield line("  nothing is written yet", hang=4)
        return
    continued = counted(answer.continued, "file")
    more = f"; {continued} were there from an earlier call" if answer.continued else ""
    yield line(f"  proven at level content, sealed, published{more}", hang=4)


def _shares(answer: Reshard) -> Iterator[Line]:
    if answer.written:
        return
    shares = answer.shares
    shown = shares if len(shares) <= _SHOWN else (*shares[: _SHOWN - 2], *shares[-1:])
    width = max((len(share.file) for share in shown), default=0)
    yield line(f"  {'shard file':<{width}}  {'size':>9}  {'entries':>7}  {'reads':>7}", solid=True)
    for number, share in enumerate(shown):
        if number == _SHOWN - 2 and len(shares) > _SHOWN:
            yield line(f"  … {counted(len(shares) - _SHOWN + 1, 'file')} more", solid=True)
        yield _share(share, width)
    yield line(f"  largest {size(answer.largest)}, smallest {size(answer.smallest)}", hang=4)


def _share(share: RankShare, width: int) -> Line:
    return line(
        f"  {share.file:<{width}}  {size(share.n_bytes):>9}  {share.n_entries:>7,}  "
        f"{share.n_reads:>7,}",
        solid=True,
    )
