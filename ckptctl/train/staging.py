"""How is a state kept as it is while the training goes on?

Copied to this machine's memory, into buffers that are used again: a save beside the
training costs one copy of what this rank holds, however many there are.
"""

from __future__ import annotations

import copy
from typing import Any

_SHARDED = ("model", "optimizer", "extra")


class Stager:
    """Copies states of one form, one at a time: a copy is good until the next is made."""

    def __init__(self) -> None:
        self._stager: Any = None

    def staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same state, of which nothing is shared with the objects of the training."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        sharded = {name: state[name] for name in _SHARDED if name in state}
        rest = {name: copy.deepcopy(state[name]) for name in state if name not in _SHARDED}
        return {**self._stager.stage(sharded), **rest} if sharded else rest
