"""State that a step holds once, though each rank has it: check that all ranks have the same.

DCP saves an entry that several ranks have from one of them, whichever writes the least. Values
that differ between ranks would be lost without an error; of buffers, as those of BatchNorm, the
ones of the lowest rank are meant, which DDP gives to the others in each forward pass.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from ckptctl.errors import UsageError
from ckptctl.train.state import PLAIN, local_tensors

OPTIONS = "optimizer options"


def digests_of_values(state: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each value of this rank that the step holds once, by the name of its part."""
    values = {name: state[name] for name in PLAIN if name in state}
    values |= {f"extra {name}": one for name, one in state.get("extra", {}).items()}
    if "optimizer" in state:
        values[OPTIONS] = state["optimizer"]["param_groups"]
    return {name: hashlib.sha256(_text(one).encode()).hexdigest() for name, one in values.items()}


def _text(value: Any) -> str:
    """A text that is equal for equal values."""
    if isinstance(value, Mapping):
        pairs = sorted((repr(key), _text(one)) for key, one in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, set | frozenset):
        return f"<{sorted(map(_text, value))}>"
    if hasattr(value, "to_local") or not hasattr(value, "tolist"):
        return repr(value)
    return f"{value.dtype} {value.tolist()!r}"


def check_equal(digests: Sequence[Mapping[str, str]]) -> None:
    """Raise `UsageError` if a value differs between the ranks that have it."""
    first: dict[str, tuple[int, str]] = {}
    for rank, own in enumerate(digests):
        for name, digest in own.items():
            other, there = first.setdefault(name, (rank, digest))
            if digest == there:
                continue
            ranks = f"ranks {other} and {rank}"
            if name == OPTIONS:
                raise UsageError(
                    f"the options of the optimizer differ between {ranks}, as those of pipeline "
                    "stages do, and a step holds them once: save with `Writer` what "
                    "get_optimizer_state_dict returns with flatten_optimizer_state_dict=True"
                )
            own_name = f"{name.removeprefix('extra ')}_{rank}"
            raise UsageError(
                f"the state of {name} differs between {ranks}, and a step holds it once: make it "
                f"equal{'' if name in PLAIN else f', or name it by rank, such as {own_name!r}'}"
            )


def buffers_of(model: Any, state: Mapping[str, Any]) -> frozenset[str]:
    """The names in a step of the model's buffers that are no shards."""
    if model is None:
        return frozenset()
    parameters = {local.data_ptr() for one in model.parameters() for local in local_tensors(one)}
    return frozenset(
        f"model.{name}"
        for name, one in state["model"].items()
        if hasattr(one, "data_ptr")
        and not hasattr(one, "to_local")
        and not hasattr(one, "local_shards")
        and one.data_ptr() not in parameters
    )


class LowestRankPlanner(DefaultSavePlanner):
    """Saves the tensors of some names from the lowest rank that has them."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._names = names

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes; on rank 0 only."""
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [one for one in plan.items if one.index not in seen]
            plans.append(dataclasses.replace(plan, items=items))
            seen.update(one.index for one in items if one.index.fqn in self._names)
        return super().create_global_plan(plans)
