"""Load a step with torch's own load, and compare the tensors with what was saved.

The load raises, returns what was saved, or returns other values without an error. It
waits forever if a pipe is in place of a shard; it is ended here after a few seconds.
"""

from __future__ import annotations

import ctypes
import pickle
import signal
import warnings
from pathlib import Path
from typing import Any

from sound_steps import Sound

PATIENCE_S = 5.0


def empty_state(subject: Sound) -> dict[str, Any]:
    """Tensors of the right shapes, all zeros, for all that the sound metadata names."""
    import torch

    metadata = pickle.loads(subject.files[".metadata"])
    return {
        fqn: torch.zeros(entry.size, dtype=entry.properties.dtype)
        if hasattr(entry, "size")
        else None
        for fqn, entry in metadata.state_dict_metadata.items()
    }


def load(step: Path, subject: Sound) -> dict[str, object]:
    """What `dcp.load` puts into the tensors; raises what it raises."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = empty_state(subject)
        dcp.load(state, checkpoint_id=step, no_dist=True)
    return {fqn: _octets(value) for fqn, value in state.items()}


def outcome_of_load(step: Path, subject: Sound, truth: dict[str, object]) -> str:
    """`raised`, `hung`, `same` or `differs`."""
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        found = load(step, subject)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return "hung" if "it does not end" in str(error) else "raised"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "same" if found == truth else "differs"


def _late(*args: object) -> None:
    raise TimeoutError("it does not end")


def _octets(value: Any) -> object:
    import torch

    if not isinstance(value, torch.Tensor):
        return repr(value)
    rows = value.detach().contiguous()
    return ctypes.string_at(rows.data_ptr(), rows.numel() * rows.element_size())
