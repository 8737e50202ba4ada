"""`ckptctl diff`: compare two steps."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.options import OfNames
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, Style, StyledText, line, next_line, section
from ckptctl.formatting import counted
from ckptctl.options import Parameter, StorageOptions
from ckptctl.resharding.results import Diff, Difference

EXAMPLES = (
    "ckptctl diff /shared/ckpt/run-1234@1200 /shared/ckpt/run-1235@1200",
    "ckptctl diff /shared/ckpt/run-1234@1200 s3://bucket/run-1235/step_1200 --values",
)
EXIT_CODES = (0, 2, 10, 11, 21, 25, 26, 28, 75, 77)

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
        bare=tuple(one.fqn for one in answer.differences if one.what != "layout"),
    )
    return answer.exit_code


def diff_lines(answer: Diff) -> list[Line]:
    """Whether the steps are the same, and what differs."""
    style: Style = "good" if answer.same else "bad"
    real = [one for one in answer.differences if one.what != "layout"]
    lines = [
        line(StyledText("same" if answer.same else "differ", style), f": {answer.message}", hang=2),
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
    return [*lines, EMPTY, *section(map(_difference, real)), *next_line(answer.next_command)]


def _difference(one: Difference) -> Line:
    if one.what.startswith("only"):
        return line(f"  {one.what.replace('-', ' ')}: {one.fqn}, {one.a or one.b}", hang=4)
    return line(f"  {one.what}: {one.fqn}: {one.a} in a, {one.b} in b", hang=4)
