"""Does the metadata belong to the step that it lies in?

A writer notes what it called the folder. A folder that was copied or renamed
bears an old name there, so another name is a suspicion and no more; what proves
that shards belong together is a seal.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ckptctl.checks.words import inside
from ckptctl.findings import Finding
from ckptctl.formats.layouts import METADATA, step_name
from ckptctl.model import Metadata, Part, Step


def check_identity(step: Step, part: Part, metadata: Metadata) -> Iterator[Finding]:
    """Yield `metadata.foreign` where the writer called the folder another step."""
    if metadata.checkpoint_id is None or step.number is None:
        return
    numbers = [
        named.number
        for word in metadata.checkpoint_id.replace("\\", "/").split("/")
        if (named := step_name(word)) is not None and not named.bare
    ]
    if not numbers or numbers[-1] == step.number:
        return
    where = inside(part.path, METADATA)
    yield Finding(
        "metadata.foreign",
        where,
        f"{where} was written for step {numbers[-1]} ({metadata.checkpoint_id}), and lies in "
        f"step {step.number}: a folder that was renamed, or metadata of another step",
        expected=f"step {step.number}",
        found=f"step {numbers[-1]}",
        next_command=f"ckptctl show {shlex.quote(step.url)}",
    )
