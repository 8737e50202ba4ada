"""Copy a state, so that training can continue while it is saved.

The copy is in main memory, in reused buffers: asynchronous saves cost one copy of what this
rank holds, however many there are.
"""

from __future__ import annotations

from typing import Any


class Stager:
    """Copies states of the same structure; a copy is valid until the next one is made."""

    def __init__(self) -> None:
        self._stager: Any = None

    def staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy that shares no memory with the objects of the training."""
        if self._stager is None:
            self._stager = _new_stager()
        copied: dict[str, Any] = self._stager.stage(state)
        return copied

    def close(self) -> None:
        """Release the buffers."""
        if hasattr(self._stager, "close"):
            self._stager.close()
        self._stager = None


def _new_stager() -> Any:
    import torch
    from torch.distributed.checkpoint import staging

    if not hasattr(staging, "DefaultStager"):  # torch before 2.9
        return _CopyingStager()
    on_gpu = torch.cuda.is_available()
    return staging.DefaultStager(
        staging.StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=on_gpu,
        )
    )


class _CopyingStager:
    """Makes a new copy each time. DTensors keep their position in the mesh, not their device."""

    def stage(self, state: Any) -> Any:
        import copy

        import torch

        if isinstance(state, torch.Tensor):
            return state.detach().to("cpu", copy=True)
        if isinstance(state, dict):
            return {key: self.stage(value) for key, value in state.items()}
        if isinstance(state, (list, tuple)):
            return type(state)(self.stage(value) for value in state)
        return copy.deepcopy(state)
