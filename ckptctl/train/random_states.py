"""Save and set the states of the random number generators of a process."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from ckptctl.formats.frameworks.state_keys import CPU_RNG_BYTES, CUDA_RNG_BYTES


def rng_state() -> dict[str, Any]:
    """The states of all generators of this process."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = tuple(torch.cuda.get_rng_state_all())
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    return state


def _numpy_state() -> tuple[Any, ...]:
    import numpy as np
    import torch

    name, key, place, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())
    return (str(name), torch.from_numpy(key.astype("int64")), int(place), int(has_gauss), gauss)


def restore_rng(state: dict[str, Any]) -> tuple[str, ...]:
    """Set all generators to a saved state; returns what could not be set."""
    import torch

    lost: list[str] = []
    if "python" in state:
        random.setstate(_as_tuples(state["python"]))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, key, place, has_gauss, gauss = state["numpy"]
        np.random.set_state((name, key.numpy().astype("uint32"), place, has_gauss, gauss))
    saved = state.get("cuda", ())
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, one in enumerate(saved[:n_devices]):
        torch.cuda.set_rng_state(one, device)
    if n_devices < len(saved):
        lost.append(f"rng of {len(saved) - n_devices} of {len(saved)} CUDA devices")
    return tuple(lost)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Leave all generators as they were before."""
    state = rng_state()
    try:
        yield
    finally:
        restore_rng(state)


def states_in(values: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The states of generators among the values of another program, in the form of `rng_state`.

    Also returns the names of the values that are none.
    """
    import torch

    state: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in values:
        for held in value.values() if isinstance(value, Mapping) else [value]:
            match held:
                case torch.Tensor() if held.numel() == CPU_RNG_BYTES and "torch" not in state:
                    state["torch"] = held.cpu()
                case torch.Tensor() if held.numel() == CUDA_RNG_BYTES:
                    state["cuda"] = (*state.get("cuda", ()), held.cpu())
                case [torch.Tensor(), *_] if all(one.numel() == CUDA_RNG_BYTES for one in held):
                    state["cuda"] = tuple(one.cpu() for one in held)
                case [3, [*_], _] if "python" not in state:
                    state["python"] = held
                case ["MT19937", key, place, has_gauss, gauss] if "numpy" not in state:
                    keys = torch.as_tensor([int(each) for each in key])
                    state["numpy"] = ("MT19937", keys, int(place), int(has_gauss), gauss)
                case []:
                    pass  # of no devices
                case _:
                    unknown.append(name)
    return state, unknown


def _as_tuples(value: Any) -> Any:
    # `random.setstate` accepts tuples only; a load may give lists.
    return tuple(_as_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def reseed(seed: int, step: int, rank: int) -> None:
    """Set all generators to a state derived from the run's seed, the step and the rank.

    Equal arguments give equal numbers; other ranks and steps get others.
    """
    import torch

    words = hashlib.sha256(f"ckptctl {seed} {step} {rank}".encode()).digest()
    derived = int.from_bytes(words[:8], "big")
    random.seed(derived)
    torch.manual_seed(derived % 2**63)  # also seeds every CUDA device
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(derived % 2**32)
