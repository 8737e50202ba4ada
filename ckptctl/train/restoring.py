"""Load the decided step, and restore it into the objects of the script.

Reads into the existing tensors of the job. Bytes that do not load are a reason to take an older
step (`LoadFailed`). A storage that does not answer, too little memory and another model are errors
that an older step would not avoid. The options of the job decide about state that another number
of ranks cannot take over. State that would be lost without such an option is an error.
"""

from __future__ import annotations

import errno
import shlex
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ckptctl.data_classes import dataclass, field
from ckptctl.distributed.process_group import ProcessGroup, ranks_lost
from ckptctl.errors import (
    CkptctlError,
    LoadFailed,
    ModelDiffers,
    PathNotFound,
    StateRefused,
    StepDamaged,
    StorageUnavailable,
)
from ckptctl.formats.pickles.reading import collector_paused
from ckptctl.formatting import counted
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Metadata
from ckptctl.options import TrainOptions
from ckptctl.storage.contract import ShortRead
from ckptctl.train.agreement import ResumeDecision, check_one_metadata
from ckptctl.train.state import (
    GLOBAL_DATA,
    Parts,
    RankPosition,
    loader_generator,
    reseed,
    restore_rng,
)


@dataclass(slots=True)
class Inventory:
    """The result for each kind of state; `notes` are for the operator."""

    restored: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lists(self) -> tuple[list[str], ...]:
        """All lists, in order."""
        return (self.restored, self.derived, self.lost, self.notes)

    def document(self) -> dict[str, list[str]]:
        """The form in the report of a resume."""
        return {"restored": self.restored, "derived": self.derived, "lost": self.lost}


@dataclass(frozen=True, slots=True)
class SavedProgress:
    """The progress of the saved run; None for numbers that the step does not contain."""

    step: int
    tokens: int | None = None
    samples: int | None = None
    world_size: int | None = None
    dp_size: int | None = None
    seed: int | None = None


def progress_of(loaded: Mapping[str, Any], step: int) -> SavedProgress:
    """The progress in the step, with the step's own number as fallback."""
    numbers = loaded.get("train_state", {})
    names = ("tokens", "samples", "world_size", "dp_size", "seed")
    known = {name: int(numbers[name]) for name in names if name in numbers}
    return SavedProgress(step=int(numbers.get("step", step)), **known)


def restore(
    loaded: Mapping[str, Any],
    parts: Parts,
    position: RankPosition,
    saved: SavedProgress,
    options: TrainOptions,
    unused: str = "",
) -> Inventory:
    """Restore everything on this rank; returns the result for each kind of state.

    `unused` names the state of the step's optimizer that is not in `loaded`; empty for none.
    Raises `StateRefused` if state would be lost that the options do not allow.
    """
    return _Restore(loaded, parts, position, saved, options, unused).run()


class _Restore:
    """One restore on one rank, with the results so far."""

    def __init__(
        self,
        loaded: Mapping[str, Any],
        parts: Parts,
        position: RankPosition,
        saved: SavedProgress,
        options: TrainOptions,
        unused: str,
    ) -> None:
        self._loaded = loaded
        self._parts = parts
        self._position = position
        self._saved = saved
        self._options = options
        self._unused = unused
        self._inventory = Inventory()

    def run(self) -> Inventory:
        """Restore every kind of state."""
        self._restore_sharded()
        self._restore_values()
        self._restore_data()
        self._restore_rng()  # last: the objects above may draw random numbers as they load
        held = self._loaded.get("train_state", {})
        self._inventory.restored += [one for one in ("step", "tokens", "samples") if one in held]
        self._refuse_lost()
        return self._inventory

    def _note(self, name: str, *, restored: bool) -> None:
        (self._inventory.restored if restored else self._inventory.lost).append(name)

    def _restore_sharded(self) -> None:
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        loaded, parts = self._loaded, self._parts
        if parts.model is not None:
            if "model" in loaded:
                set_model_state_dict(parts.model, loaded["model"])
            self._note("model", restored="model" in loaded)
        if parts.optimizer is not None:
            if "optimizer" in loaded:
                set_optimizer_state_dict(parts.model, parts.optimizer, loaded["optimizer"])
                self._forget_unsaved(loaded["optimizer"]["state"])
                self._note("optimizer", restored=True)
            if self._unused or "optimizer" not in loaded:
                self._note(f"optimizer{self._unused}", restored=False)

    def _forget_unsaved(self, state: Mapping[str, Any]) -> None:
        """Leave parameters without the state that the step does not have; see `state.template`."""
        unsaved = [fqn for fqn, held in state.items() if not held]
        if not unsaved or len(unsaved) == len(state):
            return
        for optimizer in self._parts.optimizers:
            for parameter in [one for one, held in optimizer.state.items() if not held]:
                del optimizer.state[parameter]
        self._inventory.notes.append(
            f"the step has no optimizer state of {counted(len(unsaved), 'parameter')}, such as "
            f"{unsaved[0]}: they had no gradient before it was saved, and begin without state"
        )

    def _restore_values(self) -> None:
        for name in ("scheduler", "grad_scaler"):
            part = getattr(self._parts, name)
            if part is None:
                continue
            if name in self._loaded:
                part.load_state_dict(self._loaded[name][0])
            self._note(name, restored=name in self._loaded)
        held = self._loaded.get("extra", {})
        for name, part in self._parts.extra.items():
            if name in held:
                value = held[name]
                part.load_state_dict(value[0] if isinstance(value, tuple) else value)
            self._note(f"extra {name}", restored=name in held)

    def _restore_data(self) -> None:
        parts, position, saved = self._parts, self._position, self._saved
        if parts.dataloader is None:
            return
        held = self._loaded.get("dataloader", {})
        if parts.has_global_loader and GLOBAL_DATA in held:
            self._restore_position(held[GLOBAL_DATA][0])
            return
        same = saved.dp_size in (None, position.dp_size)
        if parts.keeps_data and position.data_key in held and same:
            parts.dataloader.load_state_dict(held[position.data_key][0])
            self._note("dataloader", restored=True)
            return
        self._note("dataloader", restored=False)
        if not held:
            return
        consumed = "an unknown number of" if saved.samples is None else f"up to {saved.samples:,}"
        why = (
            f"the position in the data was saved for {saved.dp_size} data-parallel ranks, but "
            f"there are {position.dp_size} now: the data would restart, repeating {consumed} "
            "samples"
        )
        if not self._options.accept_repetition:
            raise StateRefused(
                f"{why}. Resume on {saved.dp_size} ranks, use ckptctl.train.GlobalLoader, whose "
                "position is valid for any number of ranks, or pass accept_repetition=True"
            )
        self._inventory.notes.append(why)

    def _restore_position(self, state: Mapping[str, Any]) -> None:
        loader, notes = self._parts.dataloader, self._inventory.notes
        now = loader.state_dict()
        if (state["n_samples"], state["fingerprint"]) != (now["n_samples"], now["fingerprint"]):
            why = (
                f"the data set differs from that of the step: {state['fingerprint']} there, "
                f"{now['fingerprint']} here, so the same positions are other samples"
            )
            if not self._options.accept_repetition:
                raise StateRefused(f"{why}. accept_repetition=True continues at the same position")
            notes.append(why)
        for name in ("global_batch", "num_workers", "seed"):
            if state[name] != now[name]:
                kept = "; the saved one is used" if name == "seed" else ""
                notes.append(f"{name} was {state[name]} and is {now[name]} now{kept}")
        loader.load_state_dict(dict(state))
        self._note("dataloader", restored=True)
        if self._saved.dp_size not in (None, self._position.dp_size):
            notes.append(
                f"the data continues at sample {loader.position:,}, in the same order, on "
                f"{self._position.dp_size} ranks instead of {self._saved.dp_size}"
            )

    def _restore_rng(self) -> None:
        position, saved, inventory = self._position, self._saved, self._inventory
        own = self._loaded.get("rng", {}).get(position.rng_key)
        if saved.world_size in (None, position.world_size):
            if own is not None:
                generator = loader_generator(self._parts)
                if generator is not None and "dataloader" in own[0]:
                    generator.set_state(own[0]["dataloader"])
                inventory.lost += restore_rng(own[0]["state"])
            self._note("rng", restored=own is not None)
            return
        why = (
            f"random numbers were saved for {saved.world_size} ranks, but there are "
            f"{position.world_size}"
        )
        if self._options.rng == "refuse":
            raise StateRefused(f"{why} now; rng='reseed' derives new ones")
        reseed(saved.seed or 0, saved.step, position.rank)
        inventory.derived.append("rng")
        inventory.notes.append(f"{why} now: derived from seed {saved.seed or 0}, step and rank")

    def _refuse_lost(self) -> None:
        options = self._options
        lost = self._inventory.lost
        refused = [name for name in lost if name.split()[0] not in options.accept_lost]
        if options.accept_repetition and "dataloader" in refused:
            refused.remove("dataloader")
        if refused:
            kinds = tuple(sorted({name.split()[0] for name in refused}))
            raise StateRefused(
                f"step {self._saved.step} cannot restore {', '.join(refused)}: a resume would "
                f"silently reset it. accept_lost={kinds} allows this"
            )


_STORAGE_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EHOSTDOWN}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.EMFILE, errno.ENFILE}
)

_OTHER_MODEL = ("Missing key in checkpoint", "Size mismatch between saved")
"""Messages of torch's planner for a step that does not match the state."""


def saved_metadata(decision: ResumeDecision, opened: OpenStep) -> Metadata:
    """The decoded metadata of the step. Cost: one read, or none if it was read before."""
    check_one_metadata(decision)
    return opened.metadata


def allocate_state(optimizer: Any) -> Callable[[], None]:
    """Give an Adam or AdamW without state the tensors to load into.

    Returns how to remove the state of an optimizer that had none, whoever made it.

    Their content is undefined until the load has filled them. torch (2.13, `_init_optim_state`)
    makes them by a step with gradients of 0, which takes more time than the load, and the memory
    of the gradients. Here the optimizer makes the state of one element for each dtype and device;
    that of a parameter differs only in its shape. Of other optimizers that is not known: they are
    left to torch.
    """
    import torch

    if optimizer.state:
        return lambda: None
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return optimizer.state.clear  # type: ignore[no-any-return]
    for group in optimizer.param_groups:
        options = {name: group[name] for name in optimizer.defaults if name in group}
        alike: dict[object, Mapping[str, Any]] = {}
        for parameter in group["params"]:
            kind = parameter.dtype, parameter.device
            if not parameter.requires_grad:
                continue
            if kind not in alike:
                element = torch.zeros(1, dtype=kind[0], device=kind[1], requires_grad=True)
                element.grad = torch.zeros_like(element)
                small = type(optimizer)([{**options, "params": [element]}])
                small.step()
                alike[kind] = small.state[element]
            optimizer.state[parameter] = {
                name: torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                if value.dim()
                else value.clone()
                for name, value in alike[kind].items()
            }
    return optimizer.state.clear  # type: ignore[no-any-return]


def load_into(
    state: dict[str, Any], decision: ResumeDecision, group: ProcessGroup, opened: OpenStep
) -> None:
    """Read the step into `state`; every rank calls it, with what it holds itself.

    Raises `LoadFailed` where the bytes do not load on this rank or another, and another
    `CkptctlError` for what no older step would mend. Every rank raises, not all the same.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from ckptctl.train.reader import Reader

    reader = Reader.of(opened)
    try:
        # The cyclic collector takes as long as reading a gigabyte each time torch's plan starts it.
        with collector_paused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a load without a process group
            load(state, storage_reader=reader, **group.dcp_arguments(load))
    except CheckpointException as error:  # not an Exception, so no other clause would catch it
        raise _meaning(error, decision) from error
    except RuntimeError as error:
        if group.size == 1:
            raise LoadFailed(_words(error, decision)) from error
        raise ranks_lost(error) from error
    finally:
        reader.close()


def _meaning(error: BaseException, decision: ResumeDecision) -> CkptctlError:
    failures: dict[int, Any] = getattr(error, "failures", {})
    kinds = [_meaning_of_one(rank, one[0], decision) for rank, one in sorted(failures.items())]
    # An error that an older step would not avoid takes precedence.
    kinds.sort(key=lambda one: isinstance(one, LoadFailed))
    return kinds[0] if kinds else LoadFailed(_words(error, decision))


def _meaning_of_one(rank: int, cause: BaseException, decision: ResumeDecision) -> CkptctlError:
    words = f"rank {rank}: {_words(cause, decision)}"
    verify = f"ckptctl verify {shlex.quote(decision.path or '')} --level content"
    if isinstance(cause, (StepDamaged, PathNotFound, ShortRead)):
        return LoadFailed(f"rank {rank}: {cause.message}", next_command=verify)
    if isinstance(cause, CkptctlError):
        return cause
    if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
        return ModelDiffers(f"{words}; there is not enough memory to load it")
    if any(mark in words for mark in _OTHER_MODEL):
        return ModelDiffers(f"{words}; it was saved by a different model or optimizer")
    if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRNOS:
        return StorageUnavailable(f"{words}; the state of the step is unknown", next_command=verify)
    if isinstance(cause, (TimeoutError, ConnectionError)):
        return StorageUnavailable(words, next_command=verify)
    return LoadFailed(words, next_command=verify)


def _words(cause: BaseException, decision: ResumeDecision) -> str:
    first = (str(cause).splitlines() or [""])[0][:300]
    return f"{decision.path} could not be loaded ({type(cause).__name__}: {first})"
