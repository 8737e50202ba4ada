"""Check that a step directory holds the step that its name states.

A writer notes in the metadata what it called the folder. A folder that was copied or
renamed bears an old name there, so another name is a suspicion and no more. Where the
train state's own count of steps agrees with that name, the folder claims to be further,
and a step that is further lies beside it, then it is a copy that stands in the way. That
shards belong together is proven by a seal.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from ckptctl.findings import Finding
from ckptctl.formats.frameworks.layouts import METADATA, step_name
from ckptctl.formatting import inside
from ckptctl.model import Metadata, Part, Step

_NEAR = 1
"""Some trainers count a step when it begins, others when it is done."""


def own_number(metadata: Metadata) -> int | None:
    """The step that the writer named the folder after, None where it did not say."""
    if metadata.checkpoint_id is None:
        return None
    numbers = [
        named.number
        for word in metadata.checkpoint_id.replace("\\", "/").split("/")
        if (named := step_name(word)) is not None and not named.bare
    ]
    return numbers[-1] if numbers else None


def check_identity(step: Step, part: Part, metadata: Metadata) -> Iterator[Finding]:
    """Yield `metadata.foreign` where the writer called the folder another step."""
    number = own_number(metadata)
    if number is None or step.number in (None, number):
        return
    where = inside(part.path, METADATA)
    yield Finding(
        "metadata.foreign",
        where,
        f"{where} was written for step {number} ({metadata.checkpoint_id}), but is in step "
        f"{step.number}: the folder was renamed, or the metadata belongs to another step",
        expected=f"step {step.number}",
        found=f"step {number}",
        next_command=f"ckptctl show {shlex.quote(step.url)}",
    )


def claims_further(step: Step, number: int | None) -> bool:
    """Whether the folder is named after a step further than `number`, as the writer called it."""
    return step.number is not None and number is not None and step.number > number + _NEAR


def earlier_step(step: Step, own_numbers: Collection[int], counted: int | None) -> int | None:
    """The earlier step that metadata and train state agree on; None where they do not.

    `own_numbers` are those of `own_number`, of all parts; `counted` is the count of steps
    in the train state, None where it has none. A folder that claims to be an earlier step
    is no matter: as the beginning of another run it is named so on purpose.
    """
    if counted is None or len(own_numbers) != 1:
        return None
    (number,) = own_numbers
    agree = abs(counted - number) <= _NEAR
    return number if agree and claims_further(step, max(number, counted)) else None


def wrong_step(step: Step, number: int, further: str) -> Finding:
    """The finding `step.wrong-step` for what is step `number`; `further` lies beside it."""
    return Finding(
        "step.wrong-step",
        step.name,
        f"{step.name} holds step {number}: its metadata was written for that step, and its "
        f"train state counts as many steps; {further} exists and is at least as far. A resume "
        f"from here would start at step {number}",
        expected=f"step {step.number}",
        found=f"step {number}",
    )
