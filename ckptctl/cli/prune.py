"""`ckptctl prune`: retention that cannot remove the last good step."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.documents import document
from ckptctl.cli.options import LevelOpt, RootArg, only, option
from ckptctl.cli.output import Output
from ckptctl.cli.values import level_of
from ckptctl.cli.views.prune import prune_lines
from ckptctl.options import Requirements, StorageOptions

EXAMPLES = (
    "ckptctl prune /shared/ckpt/run-1234 --keep 3",
    "ckptctl prune /shared/ckpt/run-1234 --keep 3 --apply",
)
EXIT_CODES = (0, 2, 75, 77)


def prune(
    root: RootArg,
    keep: Annotated[
        int,
        option("--keep", metavar="N", min=1, help="How many good steps to keep."),
    ],
    apply: Annotated[
        bool,
        option("--apply", help="Remove the steps; without it only the plan is printed."),
    ] = False,
    unsealed: Annotated[
        bool,
        option("--unsealed", help="Also count steps without a seal as good."),
    ] = False,
    level: LevelOpt = None,
    other_root: Annotated[
        list[str] | None,
        option(
            "--other-root",
            metavar="ROOT",
            help="Another root of the run: its marks and records count; nothing is removed there.",
        ),
    ] = None,
    *,
    requirements: Annotated[Requirements, only("require", "marks", "pattern")],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Remove old steps that are no longer needed.

    Keeps the newest N steps that pick would choose and that are sealed; with --unsealed, steps
    without a seal count after all of their bytes have been compared. If fewer than N count, nothing
    is removed. Pinned steps are kept, and so is the step that the newest attempt resumed from. With
    --quiet the paths to remove are printed.
    """
    found = ckptctl.prune(
        root,
        keep,
        apply=apply,
        unsealed=unsealed,
        level=level_of(level),
        other_roots=tuple(other_root or ()),
        requirements=requirements,
        on_looked=lambda done, total: out.progress(f"{done:,} of {total:,} steps", done, total),
        on_bytes=lambda done, total: out.progress("compared", done, total, unit="B"),
        storage=storage,
    )
    out.answer(
        lambda: document("pruned", found),
        lambda: prune_lines(found),
        bare=tuple(one.url for one in found.decisions if one.removed),
    )
    return found.exit_code
