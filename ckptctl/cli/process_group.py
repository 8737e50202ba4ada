"""Join the processes of one launcher for a command; rank 0 prints.

Under torchrun or srun a command runs once in each process: the first one answers,
the others keep quiet.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from ckptctl.cli.output import Output
from ckptctl.distributed.process_group import RankGroup, joined, place_in


def process_group(stack: ExitStack, out: Output) -> RankGroup | None:
    """The processes that torchrun or srun started besides this one; None where there are none."""
    place = place_in(os.environ)
    if place is None:
        return None
    if place.rank > 0:
        out.step_aside()
    return stack.enter_context(joined(place))
