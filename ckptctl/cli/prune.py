"""`ckptctl prune`: remove old steps, never the last good one."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import ckptctl
from ckptctl.cli.main import Stopped, ignore_signals
from ckptctl.cli.options import LevelOpt, only
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import Line, StyledText, line, next_line, padded
from ckptctl.formatting import size
from ckptctl.options import Parameter, Requirements, StorageOptions
from ckptctl.selection.pruning import Pruned

EXAMPLES = (
    "ckptctl prune /shared/ckpt/run-1234 --keep 3",
    "ckptctl prune /shared/ckpt/run-1234 --keep 3 --apply",
)
EXIT_CODES = (0, 2, 75, 77)

RootArg = Annotated[str, Parameter("ROOT", "Folder or URL that holds the steps of one run.")]


def prune(
    root: RootArg,
    keep: Annotated[int, Parameter("--keep N", "How many good steps to keep.", min=1)],
    apply: Annotated[
        bool, Parameter("--apply", "Remove the steps; without it only the plan is printed.")
    ] = False,
    unsealed: Annotated[
        bool, Parameter("--unsealed", "Also count steps without a seal as good.")
    ] = False,
    level: LevelOpt = None,
    accept_unverifiable: Annotated[
        bool,
        Parameter(
            "--accept-unverifiable",
            "Also count sealed steps whose format has no checksums, as pick takes them.",
        ),
    ] = False,
    other_root: Annotated[
        list[str] | None,
        Parameter(
            "--other-root ROOT",
            "Another root of the run: its marks and records count; nothing is removed there.",
        ),
    ] = None,
    *,
    requirements: Annotated[
        Requirements,
        only(
            "require", "state", "require_seal", "key_file", "require_signature", "marks", "pattern"
        ),
    ],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Remove old steps that are no longer needed.

    Keeps the newest N steps that pick would choose and that are sealed; with --unsealed, steps
    without a seal count after all of their bytes have been compared. If fewer than N count, nothing
    is removed. Pinned steps are kept, and so is the step that the newest attempt resumed from. With
    --quiet the paths to remove are printed.
    """
    results: list[Pruned] = []

    def ended(result: Pruned) -> None:
        ignore_signals()  # nothing is left to stop, and what was removed must be reported
        results.append(result)

    try:
        found = ckptctl.prune(
            root,
            keep,
            apply=apply,
            unsealed=unsealed,
            level=level,
            accept_unverifiable=accept_unverifiable,
            other_roots=tuple(other_root or ()),
            requirements=requirements,
            on_inspected=lambda done, total: out.progress(
                f"{done:,} of {total:,} steps", done, total
            ),
            on_bytes=lambda done, total: out.progress("compared", done, total, unit="B"),
            on_ended=ended,
            storage=storage,
        )
    except Stopped as stopped:
        if not results:
            raise
        found = replace(results[-1], exit_code=stopped.exit_code)
    out.answer(
        document_of("pruned", found),
        lambda: prune_lines(found),
        bare=tuple(one.url for one in found.decisions if one.removed),
    )
    return found.exit_code


def prune_lines(found: Pruned) -> list[Line]:
    """The answer, then every step with its decision and the reason, newest first."""
    lines = [line(StyledText(found.message, "strong"), hang=2)]
    width = max((len(str(one.number)) for one in found.decisions), default=0)
    gone = "removed" if found.applied else "goes"
    for one in found.decisions:
        word = padded(gone if one.removed else "stays", 7, "warn" if one.removed else "good")
        step = padded(str(one.number), width, right=True)
        room = padded(size(one.n_bytes), 9, right=True)
        lines.append(line("  ", word, "  ", step, room, f"  {one.reason}", hang=22 + width))
    return [*lines, *next_line(found.next_command)]
