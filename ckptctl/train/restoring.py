"""Restore a loaded step into the objects of the script, and report what is lost.

Puts what was read into the model, the optimizer and the rest, by the policies of the
job for what a change in the number of ranks does not carry over. Nothing is lost
without being said; what may be lost is the caller's word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptctl.errors import StateRefused, UsageError
from ckptctl.train.rng import reseed, restore_rng
from ckptctl.train.state import GLOBAL_DATA, Parts, Place, loader_generator

RNG_POLICIES = ("reseed", "refuse")
KINDS = ("model", "optimizer", "scheduler", "rng", "dataloader", "grad_scaler", "extra")
"""What can be lost, and what `accept_lost` may name."""


@dataclass(frozen=True, slots=True)
class Policies:
    """What to do with state that does not fit the job as it is now.

    `rng`: at another number of ranks, `reseed` (from the run's seed, the step and the rank)
    or `refuse`. `accept_repetition`: go on although samples would be repeated or skipped.
    `accept_lost`: kinds of state that may be missing from the step.
    """

    rng: str = "reseed"
    accept_repetition: bool = False
    accept_lost: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.rng not in RNG_POLICIES:
            raise UsageError(f"{self.rng!r} is no policy for rng; they are reseed and refuse")
        unknown = [kind for kind in self.accept_lost if kind not in KINDS]
        if unknown:
            raise UsageError(f"{unknown[0]!r} is no kind of state; they are {', '.join(KINDS)}")


@dataclass(slots=True)
class Inventory:
    """What came of each kind of state, in words; `notes` are worth reading before the start."""

    restored: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lists(self) -> tuple[list[str], ...]:
        """All of them, in order."""
        return (self.restored, self.derived, self.lost, self.notes)

    def document(self) -> dict[str, list[str]]:
        """As the report of a resume has it."""
        return {"restored": self.restored, "derived": self.derived, "lost": self.lost}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the saved run had come; None is what the step does not say."""

    step: int
    tokens: int | None = None
    samples: int | None = None
    world_size: int | None = None
    dp_size: int | None = None
    seed: int | None = None


def progress_of(loaded: Mapping[str, Any], step: int) -> Progress:
    """The numbers that the step holds, with the step's own number where it holds none."""
    numbers = loaded.get("train_state", {})
    names = ("tokens", "samples", "world_size", "dp_size", "seed")
    known = {name: int(numbers[name]) for name in names if name in numbers}
    return Progress(step=int(numbers.get("step", step)), **known)


def restore(
    loaded: Mapping[str, Any], parts: Parts, place: Place, saved: Progress, policies: Policies
) -> Inventory:
    """Put everything back, on this rank; what came of it.

    Raises `StateRefused` where something is lost that the policies do not let go.
    Random numbers come last: loading may draw some.
    """
    told = Inventory()
    _restore_sharded(loaded, parts, told)
    for name in ("scheduler", "grad_scaler"):
        part = getattr(parts, name)
        if part is None:
            continue
        if name in loaded:
            part.load_state_dict(loaded[name][0])
            told.restored.append(name)
        else:
            told.lost.append(name)
    for name, part in parts.extra.items():
        if name in loaded.get("extra", {}):
            value = loaded["extra"][name]
            part.load_state_dict(value[0] if isinstance(value, tuple) else value)
            told.restored.append(f"extra {name}")
        else:
            told.lost.append(f"extra {name}")
    _restore_data(loaded, parts, place, saved, policies, told)
    _restore_rng(loaded, parts, place, saved, policies, told)
    for name in ("step", "tokens", "samples"):
        if name in loaded.get("train_state", {}):
            told.restored.append(name)
    _refuse_lost(told, saved.step, policies)
    return told


def _restore_sharded(loaded: Mapping[str, Any], parts: Parts, told: Inventory) -> None:
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    if parts.model is not None:
        if "model" in loaded:
            set_model_state_dict(parts.model, loaded["model"])
        (told.restored if "model" in loaded else told.lost).append("model")
    if parts.optimizer is not None:
        if "optimizer" in loaded:
            set_optimizer_state_dict(parts.model, parts.optimizer, loaded["optimizer"])
        (told.restored if "optimizer" in loaded else told.lost).append("optimizer")


def _restore_data(
    loaded: Mapping[str, Any],
    parts: Parts,
    place: Place,
    saved: Progress,
    policies: Policies,
    told: Inventory,
) -> None:
    if parts.dataloader is None:
        return
    held = loaded.get("dataloader", {})
    if parts.has_global_loader and GLOBAL_DATA in held:
        _restore_position(held[GLOBAL_DATA][0], parts, place, saved, policies, told)
        return
    same = saved.dp_size in (None, place.dp_size)
    if parts.keeps_data and place.data_key in held and same:
        parts.dataloader.load_state_dict(held[place.data_key][0])
        told.restored.append("dataloader")
        return
    if not held:
        told.lost.append("dataloader")
        return
    consumed = "an unknown number of" if saved.samples is None else f"up to {saved.samples:,}"
    why = (
        f"the place in the data was saved for {saved.dp_size} data-parallel ranks, and there are "
        f"{place.dp_size} now: the data would start again, and {consumed} samples be repeated"
    )
    if not policies.accept_repetition:
        raise StateRefused(
            f"{why}. Resume on {saved.dp_size} ranks, use ckptctl.train.GlobalLoader, whose "
            "position any number of ranks shares, or say accept_repetition=True"
        )
    told.lost.append("dataloader")
    told.notes.append(why)


def _restore_position(
    state: Mapping[str, Any],
    parts: Parts,
    place: Place,
    saved: Progress,
    policies: Policies,
    told: Inventory,
) -> None:
    loader = parts.dataloader
    now = loader.state_dict()
    if (state["n_samples"], state["fingerprint"]) != (now["n_samples"], now["fingerprint"]):
        why = (
            f"the data set is not the one of the step: {state['fingerprint']} there, "
            f"{now['fingerprint']} here; the same positions are other samples"
        )
        if not policies.accept_repetition:
            raise StateRefused(f"{why}. accept_repetition=True goes on at the same position")
        told.notes.append(why)
    for name in ("global_batch", "num_workers", "seed"):
        if state[name] != now[name]:
            kept = "; the saved one goes on" if name == "seed" else ""
            told.notes.append(f"{name} was {state[name]} and is {now[name]} now{kept}")
    loader.load_state_dict(dict(state))
    told.restored.append("dataloader")
    if saved.dp_size not in (None, place.dp_size):
        told.notes.append(
            f"the data goes on at sample {loader.position:,}, in the same order, on "
            f"{place.dp_size} ranks instead of {saved.dp_size}"
        )


def _restore_rng(
    loaded: Mapping[str, Any],
    parts: Parts,
    place: Place,
    saved: Progress,
    policies: Policies,
    told: Inventory,
) -> None:
    own = loaded.get("rng", {}).get(place.rng_key)
    if saved.world_size in (None, place.world_size):
        if own is None:
            told.lost.append("rng")
            return
        generator = loader_generator(parts)
        if generator is not None and "dataloader" in own[0]:
            generator.set_state(own[0]["dataloader"])
        told.lost += restore_rng(own[0]["state"])
        told.restored.append("rng")
        return
    why = (
        f"random numbers were saved for {saved.world_size} ranks, and there are {place.world_size}"
    )
    if policies.rng == "refuse":
        raise StateRefused(f"{why} now; rng='reseed' derives new ones")
    reseed(saved.seed or 0, saved.step, place.rank)
    told.derived.append("rng")
    told.notes.append(f"{why} now: derived anew from seed {saved.seed or 0}, step and rank")


def _refuse_lost(told: Inventory, step: int, policies: Policies) -> None:
    refused = [name for name in told.lost if name.split()[0] not in policies.accept_lost]
    if policies.accept_repetition and "dataloader" in refused:
        refused.remove("dataloader")
    if refused:
        raise StateRefused(
            f"step {step} cannot restore {', '.join(refused)}: a resume would reset it without a "
            f"trace. accept_lost={tuple(sorted({name.split()[0] for name in refused}))} goes on"
        )
