"""`ckptctl reshard`, `convert` and `diff`: rewrite a step, and compare two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import ckptctl
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    JobsOpt,
    MemoryOpt,
    OfNames,
    OfSource,
    OnlyOpt,
    StepArg,
    only_model,
)
from ckptctl.cli.output import Output, document_of, process_group
from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    StyledText,
    finding_lines,
    line,
    next_line,
    section,
)
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.formatting import command_line, counted, exact_size, size
from ckptctl.options import Parameter, StorageOptions
from ckptctl.resharding.results import Converted, Diff, Reshard

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "reshard": (
        "ckptctl reshard /ckpt/run-1234@latest /ckpt/run-1235/step_1200 --world-size 24",
        "ckptctl reshard s3://bucket/run/step_1200 /tmp/step_1200 --world-size 8 --only model",
        "torchrun --nproc-per-node 8 --no-python ckptctl reshard SRC DST --world-size 24 --apply",
    ),
    "convert": (
        "ckptctl convert /shared/ckpt/run-1234@latest /models/run-1234 --only model",
        "ckptctl convert old/model.pt /shared/ckpt/run-1234/step_1200 --world-size 8",
        "ckptctl convert /models/base /ckpt/run-1234/step_0 --under model --accept-unverifiable",
    ),
    "diff": (
        "ckptctl diff /shared/ckpt/run-1234@1200 /shared/ckpt/run-1235@1200",
        "ckptctl diff /shared/ckpt/run-1234@1200 s3://bucket/run-1235/step_1200 --values",
    ),
}
EXIT_CODES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("reshard", "convert"), (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 75, 77)),
    "diff": (0, 2, 10, 11, 21, 25, 26, 28, 75, 77),
}


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
        return _refused_lines(answer)
    word = StyledText("resharded", "good") if answer.written else StyledText("plan", "strong")
    saved = answer.saved_world_size
    saved_by = "an unknown number of ranks" if saved is None else counted(saved, "rank")
    others = counted(answer.n_bytes_entries, "other entry", "other entries")
    ranks, tensors = counted(answer.world_size, "rank"), counted(answer.n_tensors, "tensor")
    state = line("  nothing is written yet", hang=4)
    if answer.written:
        continued = counted(answer.continued, "file")
        more = f"; {continued} were there from an earlier call" if answer.continued else ""
        state = line(f"  proven at level content, sealed, published{more}", hang=4)
    return [
        line(word, " ", StyledText(answer.target, "name"), solid=True),
        line(f"  from {answer.source}, saved by {saved_by}, for {ranks}", hang=4),
        line(
            f"  {tensors}: {answer.n_cut:,} sharded, {answer.n_whole:,} whole; {others}",
            hang=4,
        ),
        line(f"  {counted(answer.n_files, 'file')}, {exact_size(answer.n_bytes)}", hang=4),
        state,
        EMPTY,
        *section(() if answer.written else _share_lines(answer)),
        *section(finding_lines(answer.findings)),
        *next_line(answer.next_command),
    ]


def _refused_lines(answer: Reshard | Converted) -> list[Line]:
    head = line(StyledText(answer.message, "bad"), hang=2)
    findings = section(finding_lines(answer.report.findings))
    return [head, EMPTY, *findings, *next_line(answer.next_command)]


def _share_lines(answer: Reshard) -> Iterator[Line]:
    shares = answer.shares
    shown = shares if len(shares) <= _SHOWN else (*shares[: _SHOWN - 2], *shares[-1:])
    width = max((len(share.file) for share in shown), default=0)
    yield line(f"  {'shard file':<{width}}  {'size':>9}  {'entries':>7}  {'reads':>7}", solid=True)
    for number, share in enumerate(shown):
        if number == _SHOWN - 2 and len(shares) > _SHOWN:
            yield line(f"  … {counted(len(shares) - _SHOWN + 1, 'file')} more", solid=True)
        yield line(
            f"  {share.file:<{width}}  {size(share.n_bytes):>9}  {share.n_entries:>7,}  "
            f"{share.n_reads:>7,}",
            solid=True,
        )
    yield line(f"  largest {size(answer.largest)}, smallest {size(answer.smallest)}", hang=4)


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
    """That the result is there, or why it is not."""
    if not answer.written:
        return _refused_lines(answer)
    return [
        line(StyledText("converted", "good"), " ", StyledText(answer.target, "name"), solid=True),
        line("  from ", StyledText(answer.source, "name"), solid=True),
        line(f"  {answer.message}", hang=4),
        line(f"  {counted(answer.n_files, 'file')}, {exact_size(answer.n_bytes)}", hang=4),
        EMPTY,
        *section(finding_lines(answer.findings)),
        *next_line(answer.next_command),
    ]


_STEP = "PATH of a step, ROOT@1200, ROOT@latest or ROOT@auto."


def diff(
    a: Annotated[str, Parameter("A", _STEP)],
    b: Annotated[str, Parameter("B", f"The other: {_STEP}")],
    values: Annotated[
        bool,
        Parameter(
            "--values",
            "Also compare every value: by checksums for tensors with the same sharding, "
            "otherwise by bytes.",
        ),
    ] = False,
    *,
    requirements: OfNames,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Compare two steps: entries, shapes, dtypes, values.

    Sharding is reported and makes no difference: a resharded step is the same step. With --quiet
    the names of the entries that differ are printed.
    """
    answer = ckptctl.diff(
        a,
        b,
        values=values,
        pattern=requirements.pattern,
        on_progress=lambda done, total: out.progress("compared", done, total, unit="B"),
        storage=storage,
    )
    out.answer(
        document_of("diff", answer),
        lambda: diff_lines(answer),
        bare=tuple(
            difference.fqn for difference in answer.differences if difference.what != "layout"
        ),
    )
    return answer.exit_code


def diff_lines(answer: Diff) -> list[Line]:
    """Whether the steps are the same, and what differs."""
    word = StyledText("same", "good") if answer.same else StyledText("differ", "bad")
    lines = [
        line(word, f": {answer.message}", hang=2),
        line("  a: ", StyledText(answer.a, "name"), solid=True),
        line("  b: ", StyledText(answer.b, "name"), solid=True),
    ]
    if answer.n_layouts:
        lines.append(line(f"  {counted(answer.n_layouts, 'tensor')} cut differently", hang=4))
    if answer.values_compared:
        how = f"{answer.n_by_checksum:,} by checksum, {answer.n_by_bytes:,} by bytes"
        lines.append(line(f"  values of tensors compared: {how}", hang=4))
    elif not answer.one_step:
        lines.append(line("  values were not compared", hang=4))
    differences = []
    for difference in answer.differences:
        what, fqn, a, b = difference.what, difference.fqn, difference.a, difference.b
        if what.startswith("only"):
            differences.append(line(f"  {what.replace('-', ' ')}: {fqn}, {a or b}", hang=4))
        elif what != "layout":
            differences.append(line(f"  {what}: {fqn}: {a} in a, {b} in b", hang=4))
    return [*lines, EMPTY, *section(differences), *next_line(answer.next_command)]
