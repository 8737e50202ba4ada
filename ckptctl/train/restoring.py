"""Load the decided step, and restore it into the objects of the script.

Bytes that do not load are a reason to take an older step (`LoadFailed`). A storage that does not
answer, too little memory and another model are errors that an older step would not avoid. State
that would be lost is an error, unless an option of the job accepts that.

Names that belong to one tensor of the job, such as those of tied weights, are read apart and
compared: one of their values would be lost otherwise.
"""

from __future__ import annotations

import errno
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptctl.distributed.process_group import ProcessGroup, raise_interruption, ranks_lost
from ckptctl.errors import (
    CkptctlError,
    LoadFailed,
    ModelDiffers,
    PathNotFound,
    StateRefused,
    StepDamaged,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.findings import Report
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import METADATA, belongs_to_shards
from ckptctl.formats.own.contract import Drift
from ckptctl.formats.pickles.reading import collector_paused
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Metadata, PartFormat
from ckptctl.options import TrainOptions
from ckptctl.resharding.converting import state_files
from ckptctl.selection.choosing import PassedOver
from ckptctl.selection.picking import Pick
from ckptctl.storage.contract import ShortRead, Store
from ckptctl.storage.opening import base_name
from ckptctl.train.differences import Differences, RankEntries, refuse_lost
from ckptctl.train.optimizers import forget_unsaved, loaded_as_saved, same_groups, without_a_step
from ckptctl.train.passes import data_differences, passes_of, record_in
from ckptctl.train.resolving import Selection
from ckptctl.train.samples import GlobalLoader, note_on_order
from ckptctl.train.state import (
    GLOBAL_DATA,
    PLAIN,
    Parts,
    RankPosition,
    check_can_be_written,
    joined,
    loader_generator,
    local_tensors,
    reseed,
    restore_rng,
)

if TYPE_CHECKING:
    from ckptctl.train.abandoning import Branch


@dataclass(slots=True)
class Inventory:
    """The result for each kind of state; `notes` are for the operator."""

    restored: list[str] = field(default_factory=list)
    derived: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Inventory) -> None:
        for name in ("restored", "derived", "lost", "notes"):
            mine = getattr(self, name)
            mine += [entry for entry in getattr(other, name) if entry not in mine]


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
    with _accepting("train_state"):
        known = {name: int(numbers[name]) for name in names if name in numbers}
        step = int(numbers.get("step", step))
    return SavedProgress(step=step, **known)


class Restore:
    """One restore on one rank, with the result for each kind of state so far."""

    def __init__(
        self, wanted: LoadTarget, differences: Differences, saved: SavedProgress, job: Job
    ) -> None:
        self._loaded = wanted.state
        self._keeps_options = differences.keeps_options
        self._groups = wanted.groups
        self._parts = job.parts
        self._position = job.position
        self._saved = saved
        self._options = job.options
        self._inventory = Inventory(lost=list(differences.lost), notes=list(differences.notes))

    def run(self, path: str | None) -> Inventory:
        """Restore every kind of state of the step at `path`.

        Raises `StateRefused` if state would be lost that the options do not allow, and
        `ModelDiffers` if an object does not accept its state.
        """
        with loaded_as_saved(one for _, one in self._parts.named_optimizers()):
            self._restore_sharded()
            self._restore_values()
        self._restore_data()
        for part in (self._parts.dataloader, *self._parts.extra.values()):
            if (passes := passes_of(part)) is not None:
                passes.read_numbers()
        self._restore_rng()  # last: the objects above may draw random numbers as they load
        held = self._loaded.get("train_state", {})
        self._inventory.restored += [one for one in ("step", "tokens", "samples") if one in held]
        refuse_lost(self._inventory.lost, self._saved.step, path, self._options)
        return self._inventory

    def _restore_sharded(self) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        loaded, parts, inventory = self._loaded, self._parts, self._inventory
        if parts.model is not None and "model" in loaded:
            with _accepting("model"):
                set_model_state_dict(parts.model, loaded["model"])
            inventory.restored.append("model")
        if parts.optimizer is not None and "optimizer" in loaded:
            optimizer = loaded["optimizer"]
            if self._keeps_options and not same_groups(self._groups, optimizer["param_groups"]):
                optimizer["param_groups"] = list(self._groups)
                inventory.lost.append(
                    "optimizer options (the step divides the parameters into other groups)"
                )
            with _accepting("optimizer"), without_a_step(parts.optimizers):
                # Not strict: one optimizer of several may have no state, as SGD without momentum.
                set_optimizer_state_dict(
                    parts.model, parts.optimizer, optimizer, options=StateDictOptions(strict=False)
                )
            note = forget_unsaved(parts.optimizers, optimizer["state"])
            inventory.notes += [] if note is None else [note]
            inventory.restored.append("optimizer")

    def _restore_values(self) -> None:
        for name in PLAIN:
            part = getattr(self._parts, name)
            if part is None or name not in self._loaded:
                continue
            with _accepting(name):
                (saved,) = self._loaded[name]
                # A list of one scheduler is that one.
                parts = list(part) if isinstance(part, list | tuple) else [part]
                states = saved if isinstance(saved, list) else [saved]
                if len(parts) != len(states):
                    self._inventory.lost.append(
                        f"{name} (the step has {len(states)}, and this job {len(parts)})"
                    )
                    continue
                for number, pair in enumerate(zip(parts, states, strict=True)):
                    self._restore_value(name if len(parts) == 1 else f"{name} {number}", *pair)
        held, tensors = self._loaded.get("extra", {}), self._loaded.get("extra_tensors", {})
        for name, part in self._parts.extra.items():
            if name in held:
                with _accepting(f"extra {name}"):
                    (values,) = held[name]
                    state = joined(values, tensors[name])
                    self._check_loader(part, state)
                    part.load_state_dict(state)
                self._inventory.restored.append(f"extra {name}")

    def _restore_value(self, name: str, part: Any, saved: dict[str, Any]) -> None:
        """Restore a scheduler or scaler, unless its state is that of another class."""
        there, here = set(_settings(saved)), set(_settings(part.state_dict()))
        only_there, only_here = sorted(there - here), sorted(here - there)
        if (only_there and only_here) or bool(there) != bool(here):
            self._inventory.lost.append(
                f"{name} (the step's has {only_there[0] if only_there else 'no state'}, and this "
                f"job's {only_here[0] if only_here else 'no state'}: it was saved by another class)"
            )
            return
        # A program may have saved a part of it: torchtitan saves the count of a LambdaLR alone.
        part.load_state_dict({**part.state_dict(), **saved})
        for only, whose in ((only_there, "the step's"), (only_here, "this job's")):
            if only:
                self._inventory.notes.append(f"{name}: only {whose} has {some_of(only)}")
        self._inventory.restored.append(name)

    def _restore_data(self) -> None:
        parts, position, saved = self._parts, self._position, self._saved
        inventory = self._inventory
        if parts.dataloader is None:
            return
        held = self._loaded.get("dataloader", {})
        if parts.has_global_loader and GLOBAL_DATA in held:
            with _accepting("dataloader"):
                self._restore_position(*held[GLOBAL_DATA])
            return
        same = saved.dp_size in (None, position.dp_size)
        with _accepting("dataloader"):
            (own,) = held.get(position.data_key, (None,))
        workers = (_n_workers(own), getattr(parts.dataloader, "num_workers", None))
        same_workers = None in workers or workers[0] == workers[1]
        takes = not parts.has_global_loader and position.data_key in held
        if takes and same and same_workers:
            with _accepting("dataloader"):
                self._check_loader(parts.dataloader, own)
                parts.dataloader.load_state_dict(own)
            inventory.restored.append("dataloader")
            note = note_on_order(parts.dataloader)
            inventory.notes += [] if note is None else [note]
            return
        inventory.lost.append("dataloader")
        if not held:
            return
        if parts.has_global_loader != (GLOBAL_DATA in held):
            saver = "a" if GLOBAL_DATA in held else "another loader than"
            kind = type(parts.dataloader).__name__
            why = f"was saved by {saver} GlobalLoader, and this job has a {kind}"
            instead = "Resume with the same kind of loader"
        elif same:
            there = counted(workers[0] or 0, "worker")
            why = f"was saved by {there} of the loader, and there are {workers[1]} now"
            instead = f"Resume with num_workers={workers[0]}"
        else:
            there = f"{saved.dp_size} data-parallel ranks"
            why = f"was saved for {there}, but there are {position.dp_size} now"
            instead = (
                f"Resume on {saved.dp_size} ranks, use ckptctl.train.GlobalLoader, whose position "
                "is valid for any number of ranks"
            )
        consumed = "an unknown number of" if saved.samples is None else f"up to {saved.samples:,}"
        why = (
            f"the position in the data {why}: the data would restart, repeating {consumed} samples"
        )
        if not self._options.accept_repetition:
            raise StateRefused(f"{why}. {instead}, or pass accept_repetition=True")
        inventory.notes.append(why)

    def _check_loader(self, loader: Any, state: Mapping[str, Any]) -> None:
        """Compare the data of a loader with that of the step, if both are described."""
        if isinstance(loader, GlobalLoader):
            names = {"n_samples": "length", "fingerprint": "fingerprint"}
            saved, now = (
                {names[key]: one[key] for key in names} | dict(one.get("data", {}))
                for one in (state, loader.state_dict())
            )
            self._check_data(loader, saved, now)
        elif (passes := passes_of(loader)) is not None:
            self._check_data(loader, record_in(state).get("data", {}), passes.data)

    def _check_data(self, loader: Any, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raise `StateRefused` if the data differs from that of the step, unless it is accepted."""
        notes = self._inventory.notes
        if not saved:
            notes.append(
                "the step does not describe its data, so it is not known whether the data set or "
                "the batch size has changed"
            )
        found = data_differences(saved, loader, now)
        if found:
            why = (
                f"the data set differs from that of the step: {', '.join(found[:3])}; so the same "
                "positions are other samples"
            )
            if not self._options.accept_repetition:
                raise StateRefused(f"{why}. accept_repetition=True continues at the same position")
            notes.append(why)

    def _restore_position(self, state: Mapping[str, Any]) -> None:
        loader, notes = self._parts.dataloader, self._inventory.notes
        now = loader.state_dict()
        self._check_loader(loader, state)
        for name in ("global_batch", "num_workers", "seed"):
            if state[name] != now[name]:
                kept = "; the saved one is used" if name == "seed" else ""
                notes.append(f"{name} was {state[name]} and is {now[name]} now{kept}")
        loader.load_state_dict(dict(state))
        self._inventory.restored.append("dataloader")
        if self._saved.dp_size not in (None, self._position.dp_size):
            notes.append(
                f"the data continues at sample {loader.position:,}, in the same order, on "
                f"{counted(self._position.dp_size, 'rank')} instead of {self._saved.dp_size}"
            )

    def _restore_rng(self) -> None:
        position, saved, inventory = self._position, self._saved, self._inventory
        own = self._loaded.get("rng", {}).get(position.rng_key)
        if saved.world_size in (None, position.world_size):
            if own is not None:
                generator = loader_generator(self._parts)
                with _accepting("rng"):
                    (states,) = own
                    if generator is not None and "dataloader" in states:
                        generator.set_state(states["dataloader"])
                    inventory.lost += restore_rng(states["state"])
                inventory.restored.append("rng")
            elif saved.world_size is not None:  # else another program, and a note states it
                inventory.lost.append("rng")
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


def _n_workers(state: Any) -> int | None:
    """The workers that a loader of torchdata (0.11) saved its state with; None of another loader.

    It accepts the state of another number, and fails when the first batch is taken.
    """
    if not isinstance(state, Mapping):
        return None
    if "_num_yielded" in state:
        return 0
    found: int | None = state.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers")
    return found


_OF_SOME_VERSIONS = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step"})
"""What a scheduler's state holds in some versions of torch only."""


def _settings(state: Any, name: str = "") -> Iterator[str]:
    """The names of all values in the state of a scheduler, also of those that it consists of."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if key not in _OF_SOME_VERSIONS:
            yield f"{name}{key}"
            for number, inner in enumerate(value) if isinstance(value, list) else ():
                yield from _settings(inner, f"{name}{key}.{number}.")


_NOT_ACCEPTED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@contextmanager
def _accepting(what: str) -> Iterator[None]:
    """Raise `ModelDiffers` if an object of the script does not accept its state."""
    try:
        yield
    except _NOT_ACCEPTED as error:
        if "gloo" in str(error).lower() or type(error).__name__.startswith("Dist"):
            raise  # a rank was lost
        first = (str(error).splitlines() or [""])[0][:300]
        raise ModelDiffers(
            f"{what} does not accept its state in the step ({type(error).__name__}: {first}): it "
            "was saved by another class, version or program"
        ) from error


_STORAGE_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EHOSTDOWN}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.EMFILE, errno.ENFILE}
)


def saved_metadata(chosen: Report, opened: OpenStep) -> Metadata:
    """The decoded metadata of the step; that of a step of several parts, as one.

    Raises `UsageError` for a step that `dcp.save` did not write. Cost: one read for each part, or
    none if it was read before.
    """
    files = [file for file, _ in chosen.digests]
    if files == [METADATA]:
        return opened.metadata
    parts = opened.parts
    if all(part.part.format is PartFormat.DCP and part.path for part in parts):
        held = [(part.path, one) for part in parts for one in part.metadata]
        if held and all(one.rank is None for _, one in held):
            from ckptctl.train.reader import joined_parts

            return joined_parts(held)
    raise _not_of_dcp(chosen.url, opened)


def _not_of_dcp(path: str, opened: OpenStep) -> UsageError:
    """The error for a step in another format: what is there, and what would load it."""
    new = f"{opened.store.url.rstrip('/')}-dcp"
    if opened.is_file:
        return UsageError(
            f"{path} is one file of torch.save, and Checkpointer loads steps of dcp.save: make one "
            f"of it in a new root, {new}",
            next_command=command_line("convert", path, f"{new}/{base_name(path).split('.')[0]}"),
        )
    files = [file.path for file in opened.files if not belongs_to_shards(file.path)]
    held = [
        f"{file} ({', '.join(kind.names)})"
        for file in files
        if (kind := kind_of_file(opened.step.layout, file)) is not None
    ]
    command = command_line("show", path)
    try:
        then = (
            "Let the script that saved it load it once, and save it with a Checkpointer in a new "
            "root"
        )
        if state_files(opened.step, path) is not None:
            then = f"ckptctl makes a step of them in a new root, {new}"
            command = command_line("convert", path, f"{new}/{opened.name}")
    except UsageError as error:
        then = error.message
    return UsageError(
        f"{path} was not saved by dcp.save with collectives, and Checkpointer loads no other "
        f"steps; it holds {some_of(held or files or ['metadata of each rank'])}. {then}",
        next_command=command,
    )


def read_into(
    values: Mapping[str, Any], group: ProcessGroup, opened: OpenStep, metadata: Metadata
) -> dict[str, Any]:
    """Read entries of a step, by name; every rank calls it, with what it needs itself.

    Tensors are read into the `values`, and are returned with the others. Raises `LoadFailed`
    where the bytes do not load on this rank or another, and another `CkptctlError` for what no
    older step would mend. Every rank raises, not all the same.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from ckptctl.train.reader import Reader

    # torch gathers the keys of all ranks: the kinds of state are few.
    state: dict[str, Any] = {}
    divided = {name: name.partition(".") for name in values}
    for name, (kind, _, rest) in divided.items():
        if rest:
            state.setdefault(kind, {})[rest] = values[name]
        else:
            state[kind] = values[name]
    reader = Reader.of(opened, metadata)
    try:
        # The cyclic collector takes as long as reading a gigabyte each time torch's plan starts it.
        with collector_paused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a load without a process group
            load(state, storage_reader=reader, **group.dcp_arguments(load))
    except CheckpointException as error:  # not an Exception, so no other clause would catch it
        raise_interruption(error.failures, group.rank)
        failures = sorted(error.failures.items())
        errors = [_meaning(rank, cause, opened.url) for rank, (cause, _) in failures]
        # An error that an older step would not avoid takes precedence.
        errors.sort(key=lambda error: isinstance(error, LoadFailed))
        raise (errors or [LoadFailed(_words(error, opened.url))])[0] from error
    except RuntimeError as error:
        if group.size == 1:
            raise LoadFailed(_words(error, opened.url)) from error
        raise ranks_lost(error) from error
    finally:
        reader.close()
    return {
        name: state[kind][rest] if rest else state[kind]
        for name, (kind, _, rest) in divided.items()
    }


def _meaning(rank: int, cause: BaseException, url: str) -> CkptctlError:
    """What the error of one rank means for the step at `url`."""
    words = f"rank {rank}: {_words(cause, url)}"
    verify = command_line("verify", url, "--level", "content")
    if isinstance(cause, (StepDamaged, PathNotFound, ShortRead)):
        return LoadFailed(f"rank {rank}: {cause.message}", next_command=verify)
    if isinstance(cause, CkptctlError):
        return cause
    if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
        return ModelDiffers(f"{words}; there is not enough memory to load it")
    if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRNOS:
        return StorageUnavailable(f"{words}; the state of the step is unknown", next_command=verify)
    if isinstance(cause, (TimeoutError, ConnectionError)):
        return StorageUnavailable(words, next_command=verify)
    return LoadFailed(words, next_command=verify)


def _words(cause: BaseException, url: str) -> str:
    first = (str(cause).splitlines() or [""])[0][:300]
    return f"{url} could not be loaded ({type(cause).__name__}: {first})"


class LoadTarget:
    """The state that a load fills on this rank, by the names of the entries of the step.

    `saved` is the step as this rank sees it, `own` are the names in it that differ, and `values`
    those that were read before, by their names here. `groups` are the groups of parameters of this
    job's optimizers, as they are before the load.
    """

    def __init__(
        self,
        state: dict[str, Any],
        saved: Metadata,
        own: Mapping[str, str],
        values: Mapping[str, Any],
    ) -> None:
        import torch
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        self.state = state
        groups = state.get("optimizer", {}).get("param_groups", ())
        self.groups: tuple[dict[str, Any], ...] = tuple(map(dict, groups))
        self._saved = saved
        self._own = own
        self._values = values
        self._flat, self._paths = flatten_state_dict(state)
        self._tensors = [
            (name, value) for name, value in self._flat.items() if isinstance(value, torch.Tensor)
        ]
        self._tied: dict[str, str] = {}
        """Each name of the step whose tensor has another name before it, and that name."""
        self._also_restored: set[str] = set()
        """Names that the step lacks, of tensors that it has under another name on this rank."""
        self._find_ties()

    def entries(self, parts: Parts, names: Iterable[str]) -> RankEntries:
        """What this rank loads of the step, whose entries have these names.

        Raises `ModelDiffers` if the step was saved by another model or optimizer, and
        `UsageError` for a tensor that nothing can be loaded into: no older step avoids that.
        """
        self._check_fits(parts)
        tensors = self._saved.tensors
        loaded = {self._own.get(name, name) for name in self._flat}
        digits = "".join("01"[name in loaded] for name in names)
        casts = {
            (name.partition(".")[0], tensors[name].dtype, str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors
            if name in tensors
        }
        absent = (name for name in self._flat if not self._is_saved(name))
        missing = tuple(name for name in absent if name not in self._also_restored)
        casts = {cast for cast in casts if cast[1] != cast[2]}
        used = int(digits or "0", 2)
        return RankEntries(used, missing, parts.given, len(self.groups), frozenset(casts))

    def fill(
        self, differences: Differences, read: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> tuple[str, ...]:
        """Fill the state by `read`, which takes and returns values by their names in the step.

        An optimizer that is not kept is taken out of the state. Returns what is lost: the tensors
        that are one in this job, and differ in the step.
        """
        if not differences.keeps_optimizer:
            del self.state["optimizer"]
        left_out: tuple[str, ...] = ()
        if not differences.keeps_options:
            left_out = ("optimizer.param_groups." if differences.keeps_optimizer else "optimizer.",)
        names = {}
        for name in self._flat:
            if self._is_saved(name) and name not in self._values and not name.startswith(left_out):
                names[self._own.get(name, name)] = name
        values = {}
        for there, name in names.items():
            own = self._flat[name]
            values[there] = own.detach().clone() if name in self._tied else own
        loaded = read(values)
        lost = []
        for there, name in names.items():
            first = self._tied.get(name)
            if first is None:
                self._set(name, loaded[there])
            elif not _same_bits(loaded[there], self._flat[first]):
                kind = name.partition(".")[0].removesuffix("_tensors")
                both = f"{first} and {name}"
                lost.append(f"{kind} ({both} are one tensor in this job, and differ in the step)")
        for name in self._values.keys() & self._paths.keys():
            if self._paths[name][0] in self.state:
                self._set(name, self._values[name])
        return tuple(lost)

    def _set(self, name: str, value: Any) -> None:
        path = self._paths[name]
        container: Any = self.state
        for part in path[:-1]:
            container = container[_key(container, part)]
        container[_key(container, path[-1])] = value

    def _find_ties(self) -> None:
        """Find the names that belong to one tensor of this job."""
        names_of: dict[object, list[str]] = defaultdict(list)
        for name, tensor in self._tensors:
            if hasattr(tensor, "local_shards"):
                continue
            (local,) = local_tensors(tensor)
            if local.is_meta or str(local.layout) != "torch.strided":
                continue
            if local.numel():
                place = local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
                names_of[place].append(name)
            elif tensor.numel() and not self._is_saved(name):
                # The ranks that hold elements of the tensor report whether it is lost.
                self._also_restored.add(name)
        for names in names_of.values():
            saved = [name for name in names if self._is_saved(name)]
            self._tied |= dict.fromkeys(saved[1:], saved[0] if saved else "")
            self._also_restored |= set(names) - set(saved) if saved else set()

    def _is_saved(self, name: str) -> bool:
        return name in self._saved.tensors or name in self._saved.bytes_entries

    def _check_fits(self, parts: Parts) -> None:
        differing = []
        for name, value in self._flat.items():
            is_tensor = name in self._saved.tensors
            if self._is_saved(name) and is_tensor != hasattr(value, "layout"):
                here = type(value).__name__
                there = "a tensor" if is_tensor else "another value"
                raise ModelDiffers(
                    f"{name} is a {here} here and {there} in the step; it was saved by a different "
                    "model or optimizer"
                )
        for name, tensor in self._tensors:
            for local in local_tensors(tensor):
                check_can_be_written(name, local)
            entry = self._saved.tensors.get(name)
            if entry is not None and entry.shape != tuple(tensor.shape):
                differing.append(
                    f"{name} is {tuple(tensor.shape)} here and {entry.shape} in the step"
                )
        if differing:
            raise ModelDiffers(
                f"{counted(len(differing), 'tensor')} of this job have another shape in the step: "
                f"{differing[0]}; it was saved by a different model"
            )
        if parts.model is not None:
            self._check_naming("model", list(self.state.get("model", ())), 1)
        groups = self.state.get("optimizer", {}).get("param_groups", ())
        self._check_naming("optimizer", [fqn for one in groups for fqn in one["params"]], 2)

    def _check_naming(self, kind: str, own: Sequence[str], depth: int) -> None:
        """Raise `ModelDiffers` if the step has state of other parameters only."""
        saved = {
            str(entry.path[depth])
            for entry in self._saved.tensors.values()
            if entry.path[0] == kind and entry.path[depth:]
            if depth == 1 or entry.path[1] == "state"
        }
        if own and saved and not saved.intersection(own):
            first = next(name for name in self._saved.tensors if name.startswith(f"{kind}."))
            raise ModelDiffers(
                f"the step holds {kind} state of other names: {own[0]} of this job is not in it; "
                f"it holds {first}, and was saved by a different model or optimizer"
            )


def _key(container: Any, part: str | int) -> Any:
    """The key of a container that DCP names by `part`: it makes text of the keys of a dict."""
    if not isinstance(container, dict) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)


def _same_bits(one: Any, other: Any) -> bool:
    """Whether the parts of two tensors on this rank have equal bits, which NaN has with itself."""
    import torch

    pairs = zip(local_tensors(one), local_tensors(other), strict=True)
    return all(
        torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        for ours, theirs in pairs
    )


Tell = Callable[[str], None]
"""Prints one line for the operator."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job continues: after `step`, which is 0 for a fresh run.

    `path` is the loaded step, None for a fresh run. `tokens` and `samples` are the counts
    that the run had consumed, 0 if the step has none. `rejected` are newer steps that were
    not chosen. `report` is the document at `report_path`. In a replay `last` is the last
    step to train, and no report is written. `drift` are the terms of the contract that differ
    from those of the step; empty where one of the two states none.
    """

    step: int
    tokens: int
    samples: int
    path: str | None
    fell_back: bool
    rejected: tuple[PassedOver, ...]
    report: Mapping[str, Any]
    report_path: str | None
    last: int | None = None
    drift: tuple[Drift, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether the run starts at step 0."""
        return self.path is None


@dataclass(frozen=True, slots=True)
class Job:
    """The environment of a resume: roots, ranks, their objects, and the caller's options.

    `root` is held and saved to; `stores` are all roots by address, in order of preference.
    `later` opens `root` with a short timeout and no retries, for writes beside training.
    """

    root: str
    store: Store
    group: ProcessGroup
    position: RankPosition
    parts: Parts
    options: TrainOptions
    selection: Selection
    tell: Tell
    later: Store
    stores: Mapping[str, Store]

    def tolerated(self, url: str) -> tuple[type[StorageError], ...]:
        """The errors of a root that do not prevent a resume: all those of an optional root."""
        return (StorageError,) if url in self.selection.roots.optional else ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The chosen step, after it was restored into the objects of the script.

    `opened` is the step as this rank read it, None for a fresh run. `branches` are what the
    resume abandons, on rank 0, at the time of the decision. `not_loaded` are the steps that were
    chosen before.
    """

    decision: Pick
    saved: SavedProgress
    inventory: Inventory
    opened: OpenStep | None = None
    branches: tuple[Branch, ...] = ()
    not_loaded: tuple[PassedOver, ...] = ()
