"""Read a step that another program saved: each entry under the name that it has in this job.

`formats.frameworks.state_keys` decides what an entry is, unless the script maps it with `names=`.
Tensors of model and optimizer are named anew and loaded like those of any step. Everything else is
small: it is read before, so that nothing is written to the objects of the script if the step
cannot be loaded. State that is left in the step is refused, with the argument that loads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckptctl.errors import ModelDiffers, RecordUnsafe, StateRefused, UsageError
from ckptctl.findings import Report
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import belongs_to_shards, is_own, layout_of, step_name
from ckptctl.formats.frameworks.parts import may_be_archive
from ckptctl.formats.frameworks.state_keys import (
    SCALER_MARKS,
    Leaf,
    StateKind,
    StateMap,
    entries_of,
    entry_kinds,
    file_holds_no_state,
    is_count_of_one_rank,
    is_scaler_name,
    kinds_in_file,
    leaves_of,
    outermost_key,
)
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.inspecting import train_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.train_state import likeliest_step, without_wrappers
from ckptctl.model import STATE_KINDS, BytesEntry, Metadata, TensorEntry
from ckptctl.options import TrainOptions
from ckptctl.train.differences import accepted_losses
from ckptctl.train.rank_names import Path
from ckptctl.train.state import (
    GLOBAL_DATA,
    PARTS,
    TENSOR,
    Parts,
    RankPosition,
    kept_random_states,
    state_of,
    states_in,
)

Read = Mapping[str, Any]
"""The values of entries, by their names in the step."""
NAMED = (*PARTS, "rng", "step", "tokens", "samples")
"""The kinds of state that `names` may map, besides the names in `extra`."""

_VALUES = ("scheduler", "grad_scaler", "dataloader")
_SHOWN = 20
_WRAPPERS = (("model",), ("optimizer",))


def check_names(names: Mapping[str, str], parts: Parts) -> None:
    """Raise `UsageError` for a kind of state that `names` cannot map."""
    unknown = [kind for kind in names if kind not in NAMED and kind not in parts.extra]
    if unknown:
        raise UsageError(
            f"names maps {unknown[0]!r}, which is not a kind of state; expected one of "
            f"{', '.join((*NAMED, *parts.extra))}"
        )
    for kind, key in names.items():
        if not isinstance(key, str) or not key:
            raise UsageError(f"names maps {kind} to {key!r}; expected a key of the step, as text")


def is_of_another_program(saved: Metadata) -> bool:
    """Whether a step was not saved by a `Checkpointer`, which writes this in each."""
    return "train_state.dp_size" not in saved.bytes_entries


_OF_ONE_RANK = ("rng.", "dataloader.", "train_state.")


@dataclass(frozen=True, slots=True)
class StepView:
    """A step as one rank sees it.

    `names` are those in the step, by the names here, where they differ. `shared` is the step
    without what only some ranks have. `values` are loaded already, by their names here. `lost` is
    what the options accept.
    """

    saved: Metadata
    names: Mapping[str, str]
    shared: Metadata
    values: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FilesBeside:
    """The files of `torch.save` beside the shards of a step that one rank reads.

    `values` are what they hold, with what their names state. `refused` are those that cannot be
    loaded, each with the reason. `n_ranks` counts the files of random states, of which each rank
    has its own.
    """

    values: Mapping[str, tuple[StateKind | None, Any]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    n_ranks: int = 0


def read_files_beside(opened: OpenStep, rank: int) -> FilesBeside:
    """Read the files beside the shards; of those of each rank, this rank's own.

    No code from them is run. Cost: a listing of the step, and each of these files.
    """
    from ckptctl.train.safe_values import safe_value

    files = opened.files
    named = step_name(opened.name)
    layout = layout_of(named, files)
    values: dict[str, tuple[StateKind | None, Any]] = {}
    refused: dict[str, str] = {}
    ranks = set()
    for file in files:
        path, by_name = file.path, kind_of_file(layout, file.path)
        if belongs_to_shards(path) or is_own(path) or file_holds_no_state(path):
            continue
        if by_name is not None and by_name.rank is not None:
            ranks |= {by_name.rank} if by_name.names == ("rng",) else set()
            if by_name.rank != str(rank):
                continue
        if not may_be_archive(path) or not file.size or file.kind != "file":
            continue
        if file.size > _MAX_FILE_BYTES:
            refused[path] = f"which has {file.size:,} bytes"
            continue
        try:
            data = opened.store.read(opened.in_store(path), limit=_MAX_FILE_BYTES)
            values[path] = by_name, safe_value(data, path)
        except RecordUnsafe as error:
            why = error.message.removeprefix(f"entry {path} ").partition(", which may run")[0]
            refused[path] = f"which {why} and was not loaded"
    return FilesBeside(values, refused, len(ranks))


_MAX_FILE_BYTES = 1 << 30
"""Larger files hold weights, which each rank would read whole."""


class ParameterNames(NamedTuple):
    """The names of a job's parameters: those of its model, and those of each optimizer group."""

    model: frozenset[str]
    groups: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(state: Mapping[str, Any]) -> ParameterNames:
        groups = state.get("optimizer", {}).get("param_groups", ())
        return ParameterNames(
            frozenset(state.get("model", ())), tuple(tuple(one["params"]) for one in groups)
        )


class _StepEntry(NamedTuple):
    """An entry of the step; `key` is that under which messages name it, the front of its path.

    The first key of a value in a file beside the shards is the path of the file; `entry` is None.
    """

    name: str
    path: Path
    key: str
    n_key: int
    kind: StateKind
    entry: TensorEntry | BytesEntry | None = None

    def tail(self, n_words: int) -> Path:
        """The path without its first words, of which one key may hold several."""
        for number, key in enumerate(self.path):
            if n_words == 0:
                return self.path[number:]
            words = str(key).split(".")
            if len(words) > n_words:
                return (".".join(words[n_words:]), *self.path[number + 1 :])
            n_words -= len(words)
        return ()


class _Left(NamedTuple):
    """State of the step that this job does not load: its kind, what it is, and what loads it."""

    kind: str
    text: str
    remedy: str


class _Made(NamedTuple):
    """A value for this job, None for none, with what it leaves in the step and a note about it."""

    value: Any
    left: tuple[_Left, ...] = ()
    note: str = ""


_Maker = Callable[[Read, int], _Made]
"""What makes a value of those that were read, and of the number of the step."""


class Move:
    """A step of another program, for the parts of one script.

    `outlines` are those of all ranks, `names` what the script maps. Cost: that of `entry_kinds`,
    and a few look-ups for each entry.
    """

    def __init__(
        self,
        saved: Metadata,
        outlines: Sequence[ParameterNames],
        parts: Parts,
        position: RankPosition,
        names: Mapping[str, str],
        beside: FilesBeside,
    ) -> None:
        self._saved = saved
        self._beside = beside
        self._parts = parts
        self._position = position
        self._groups = outlines[0].groups if len({one.groups for one in outlines}) == 1 else ()
        self._by_number = [fqn for group in self._groups for fqn in group]
        self._model = frozenset().union(*(one.model for one in outlines))
        self._known = self._model.union(
            fqn for one in outlines for group in one.groups for fqn in group
        )
        self._front: tuple[str, ...] = ()
        """The words in front of the model's names: the optimizer may have some of them too."""
        self._left: list[_Left] = []
        self._notes: list[str] = []
        self._tensors: dict[str, TensorEntry] = {}
        self._bytes: dict[str, BytesEntry] = {}
        self._here: dict[str, str] = {}
        self._makers: dict[str, _Maker] = {}
        """By the names here of the values."""
        self._to_read: set[str] = set()
        self._in_files: dict[str, Any] = {}
        """The values in files beside the shards, by the names of their entries."""
        self._lists: list[str] = []
        """The entries that list the parameters of the optimizer's groups."""
        self._entries = self._recognized(())
        self._mapped = {kind: self._mapped_root(kind, key) for kind, key in names.items()}
        if names:
            keys = {
                kind: root[1:] or root if root[0] in beside.values else root
                for kind, root in self._mapped.items()
            }
            self._entries = self._recognized([(kind, _dotted(key)) for kind, key in keys.items()])
        children: dict[Path, set[str | int]] = defaultdict(set)
        for entry in self._entries.values():
            children[entry.path[:-1]].add(entry.path[-1])
        self._scalers = {owner for owner, keys in children.items() if keys >= SCALER_MARKS}
        self._kinds_below: dict[Path, set[str]] = defaultdict(set)
        for entry in self._entries.values():
            for n in range(1, len(entry.path) + 1):
                self._kinds_below[entry.path[:n]].add(self._kind(entry))
        for name in parts.extra:
            self._find_extra(name)
        self._find_model()
        self._find_optimizer()
        self._find_value("scheduler")
        self._find_value("grad_scaler")
        self._find_dataloader()
        self._find_random_states()
        self._find_counts()
        self._find_left()
        self._to_read -= self._in_files.keys()

    def view(self, read: Read, chosen: Report, options: TrainOptions) -> StepView:
        """The chosen step in the names of this job; `read` are the values.

        Raises `StateRefused` for state that would stay in the step, unless the options accept it.
        """
        number = chosen.number or 0
        accepted = accepted_losses(options)
        read = {**read, **self._in_files}
        made = {name: make(read, number) for name, make in self._makers.items()}
        values = {name: one.value for name, one in made.items() if one.value is not None}
        left = [*self._left]
        numbers = [
            number for name in self._lists for number in read[name] if isinstance(number, int)
        ]
        n_own = len(self._by_number)
        if numbers and len(numbers) != n_own:
            text = f"optimizer of {counted(len(numbers), 'parameter')} by number"
            remedy = f"this job's has {n_own or 'others on each rank'}; give it those of the run"
            left.append(_Left("optimizer", text, remedy))
        left += [each for one in made.values() for each in one.left]
        notes = [*self._notes, *(one.note for one in made.values() if one.note)]
        if "train_state.step" not in values:
            trained = train_step(chosen)
            values["train_state.step"] = trained
            if trained is None:
                text = "a number in its name that counts saves or epochs, and no count of steps"
                remedy = "names={'step': KEY} maps one that it holds under another name"
                left.append(_Left("step", text, remedy))
        refused = [one for one in left if one.kind not in accepted]
        if refused:
            raise StateRefused(
                f"step {number} was saved by another program, and holds state that this job would "
                f"not load: {'; '.join(f'{one.text} ({one.remedy})' for one in refused)}",
                next_command=command_line("show", chosen.url),
            )
        kinds = tuple(f"{one.kind}." for one in left if one.kind in PARTS)
        small = dict(self._bytes)
        for name in values:
            words = name.split(".")
            path = tuple(int(word) if word.isdecimal() else word for word in words)
            small[name] = BytesEntry(name, None, path)
        tensors = {name: one for name, one in self._tensors.items() if not name.startswith(kinds)}
        held = {name: one for name, one in small.items() if not name.startswith(kinds)}
        saved = replace(self._saved, tensors=tensors, bytes_entries=held)
        lost = tuple(f"{one.kind} ({one.text})" for one in left)
        # The same on every rank: what only some ranks have is left out.
        held = {name: one for name, one in held.items() if not name.startswith(_OF_ONE_RANK)}
        shared = replace(saved, bytes_entries=held)
        return StepView(saved, self._here, shared, values, lost, tuple(notes))

    def request(self) -> dict[str, Any]:
        """What a load fills to read the values that `view` takes, by their names in the step."""
        import torch

        tensors = self._saved.tensors
        values: dict[str, Any] = dict.fromkeys(sorted(self._to_read), 0)
        for name in values.keys() & tensors.keys():
            values[name] = torch.empty(
                tensors[name].shape, dtype=getattr(torch, tensors[name].dtype)
            )
        return values

    # What the step holds

    def _recognized(self, mapped: StateMap) -> dict[str, _StepEntry]:
        kinds = entry_kinds(self._saved, "", mapped)
        everything: Mapping[str, TensorEntry | BytesEntry]
        everything = {**self._saved.tensors, **self._saved.bytes_entries}
        entries = {}
        for name, leaf in entries_of(self._saved):
            path, key = tuple(leaf.path), outermost_key(leaf)
            n_key = next(n for n in range(1, len(path) + 1) if _dotted(path[:n]) == key)
            entries[name] = _StepEntry(name, path, key, n_key, kinds[name], everything[name])
        for file, (by_name, value) in self._beside.values.items():
            held = [*_leaves_in(value)]
            leaves = [leaf for leaf, _ in held]
            found = kinds_in_file(leaves, by_name, mapped, file)
            is_of_one_kind = by_name is not None and len(by_name.names) == 1
            for (leaf, one), kind_of_leaf in zip(held, found, strict=True):
                counts = kind_of_leaf.names[0] in ("step", "tokens")
                if counts and by_name is not None and by_name.names == ("rng",):
                    continue  # accelerate counts the batches of an epoch there
                key = outermost_key(leaf)
                n_key = next(
                    n for n in range(len(leaf.path) + 1) if _dotted(tuple(leaf.path[:n])) == key
                )
                n_key = 0 if is_of_one_kind else n_key
                front = _shown((file, *leaf.path[:n_key]))
                entry = _StepEntry(
                    _shown((file, *leaf.path)), (file, *leaf.path), front, n_key + 1, kind_of_leaf
                )
                entries[entry.name], self._in_files[entry.name] = entry, one
        return entries

    def _mapped_root(self, kind: str, key: str) -> Path:
        root = self._root_of_key(key)
        if root is None:
            keys = dict.fromkeys(one.key for one in self._entries.values())
            raise StateRefused(
                f"names maps {kind} to {key!r}, which the step does not hold; it holds "
                f"{', '.join([*keys][:_SHOWN])}"
            )
        return root

    def _kind(self, entry: _StepEntry) -> str:
        """The kind of an entry, of which a scaler is one here."""
        if entry.kind.names == ("other",) and (
            entry.path[:-1] in self._scalers or is_scaler_name(entry.key.rpartition(".")[2])
        ):
            return "grad_scaler"
        return entry.kind.names[0]

    def _of_kind(self, kind: str) -> list[_StepEntry]:
        """The entries of one kind that are not taken yet."""
        return [one for one in self._entries.values() if self._kind(one) == kind]

    def _roots(self, kind: str, entries: Iterable[_StepEntry]) -> list[Path]:
        """The shortest fronts of paths below which all is of one kind."""
        if kind in self._mapped:
            return [self._mapped[kind]]
        roots: dict[Path, None] = {}
        for entry in entries:
            path, n = entry.path, entry.n_key
            if path[:-1] in self._scalers:
                n = min(n, len(path) - 1)  # its values are at the top of a file of its own
            is_whole_file = entry.entry is None and n == 1
            while n < len(path) and not is_whole_file and self._kinds_below[path[:n]] != {kind}:
                n += 1
            roots[path[:n]] = None
        return [*roots]

    def _root_of_key(self, key: str) -> Path | None:
        """The path of a key that a script gives, in front of which wrappers may stand."""
        for entry in self._entries.values():
            for n in range(1, len(entry.path) + 1):
                front = _dotted(entry.path[:n])
                in_file = entry.entry is None and key in (
                    _dotted(entry.path[1:n]),
                    _shown(entry.path[:n]),
                )
                in_wrapper = front.endswith(f".{key}") and entry.key.startswith(front[: -len(key)])
                if front == key or in_file or in_wrapper:
                    return entry.path[:n]
        return None

    def _take(self, entries: Iterable[_StepEntry], *, read: bool = True) -> list[_StepEntry]:
        """Take entries of the step; with `read`, their values are needed."""
        taken = [*entries]
        for entry in taken:
            self._entries.pop(entry.name, None)
        if read:
            self._to_read.update(entry.name for entry in taken)
        return taken

    def _take_below(self, root: Path, *, read: bool = True) -> list[_StepEntry]:
        below = [entry for entry in self._entries.values() if entry.path[: len(root)] == root]
        return self._take(below, read=read)

    def _place(self, entry: _StepEntry, path: Path) -> None:
        name = _dotted(path)
        held = entry.entry
        if isinstance(held, TensorEntry):
            self._tensors[name] = replace(held, fqn=name, path=path)
        elif held is not None:
            self._bytes[name] = replace(held, fqn=name, path=path)
        self._here[name] = entry.name

    def _parameter(self, name: str) -> str:
        """The name in this job of a parameter, which the step may number or wrap."""
        if name in self._known:
            return name
        if name.isdecimal():
            return self._by_number[int(name)] if int(name) < len(self._by_number) else name
        plain = ".".join(without_wrappers(name))
        for n in range(len(self._front)):
            front = ".".join(self._front[n:])
            if plain.startswith(f"{front}.") and plain[len(front) + 1 :] in self._known:
                return plain[len(front) + 1 :]
        return plain if plain in self._known else name

    def _name_of(self, root: Path) -> str:
        return _shown(root) if root[0] in self._beside.values else _dotted(root)

    def _only(self, kind: str, roots: Sequence[Path]) -> Path | None:
        """The root of the state of one kind, if there is one and the script has such a part."""
        if not roots:
            return None
        keys = [self._name_of(root) for root in roots]
        if len(roots) > 1:
            remedy = f"names={{{kind!r}: {keys[0]!r}}} states which one is that of this job"
            self._left.append(_Left(kind, f"{kind} as {', '.join(keys)}", remedy))
        elif kind not in self._parts.given:
            remedy = f"pass {kind}= to Checkpointer"
            self._left.append(_Left(kind, f"{kind} as {keys[0]}", remedy))
        else:
            return roots[0]
        for root in roots:
            self._take_below(root, read=False)
        return None

    # Kinds of state

    def _find_extra(self, name: str) -> None:
        root = self._mapped.get(name) or self._root_of_key(name)
        if root is None:
            return
        part = self._parts.extra[name]
        with kept_random_states():
            own = part.state_dict()
        below = self._take_below(root, read=False)
        # A part of a step may hold a model or an optimizer below a key of its own.
        keys = {entry.path[len(root) : len(root) + 1] for entry in below}
        wrapper = keys.pop() if len(keys) == 1 else ()
        if wrapper in _WRAPPERS and isinstance(own, Mapping) and own and wrapper[0] not in own:
            root = (*root, *wrapper)
        tails = {entry.name: entry.path[len(root) :] for entry in below}
        for entry in below:
            if isinstance(entry.entry, TensorEntry) and tails[entry.name]:
                self._place(entry, ("extra_tensors", name, _dotted(tails[entry.name])))
            else:
                self._to_read.add(entry.name)

        def make(read: Read, _: int) -> _Made:
            held = [
                (tail, read[each] if each in read else {TENSOR: _dotted(tail)})
                for each, tail in tails.items()
            ]
            return _Made((_assembled(held, own, numbered=hasattr(part, "param_groups")),))

        self._makers[f"extra.{name}"] = make

    def _find_optimizer(self) -> None:
        entries = self._of_kind("optimizer")
        found = dict.fromkeys(
            one.name.partition("param_groups")[0].rstrip(".")
            for one in entries
            if "param_groups" in one.name.split(".")
        )
        mapped = _dotted(self._mapped["optimizer"]) if "optimizer" in self._mapped else None
        roots = [root for root in found if mapped is None or f"{root}.".startswith(f"{mapped}.")]
        if len(roots) == 1:
            (root,) = roots
            start, n_words = (f"{root}.", root.count(".") + 2) if root else ("", 1)
            entries = [one for one in self._entries.values() if one.name.startswith(start)]
            if not root:
                entries = self._of_kind("optimizer")
            tails = {one.name: _tail_in_optimizer(one, start, n_words) for one in entries}
        if entries and (not roots or (len(roots) == 1 and not all(tails.values()))):
            self._take(entries, read=False)
            odd = [one.name for one in entries if len(roots) != 1 or not tails[one.name]]
            text = f"optimizer as {some_of(odd)}, in another form than that of torch's optimizers"
            remedy = f"pass extra={{{entries[0].key!r}: ...}}, an object that loads it"
            self._left.append(_Left("optimizer", text, remedy))
        elif self._only("optimizer", [tuple(root.split(".")) for root in roots]) is not None:
            self._take(entries, read=False)
            self._place_optimizer([(one, tails[one.name]) for one in entries], len(start))

    def _place_optimizer(self, entries: Iterable[tuple[_StepEntry, Path]], n_start: int) -> None:
        flat: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for entry, (first, value, *rest) in entries:
            group = str(first)
            if entry.name[n_start:].startswith("state."):
                path = ("optimizer", "state", self._parameter(group), value, *rest)
                self._place(entry, path)
            elif not group.isdecimal():
                flat[self._parameter(group)][str(value)].append(entry.name)
                self._to_read.add(entry.name)
            elif value == "params":
                self._to_read.add(entry.name)
                self._lists.append(entry.name)
                name = f"optimizer.param_groups.{group}.params"
                self._makers[name] = self._parameters(entry.name)
            else:
                self._place(entry, ("optimizer", "param_groups", int(group), value, *rest))
        for number, fqns in enumerate(self._groups if flat else ()):
            self._find_flat_group(f"optimizer.param_groups.{number}", fqns, flat)

    def _parameters(self, name: str) -> _Maker:
        """What makes the names of a group's parameters of those or the numbers in the step."""
        return lambda read, _: _Made([self._parameter(str(each)) for each in read[name]])

    def _find_flat_group(
        self, name: str, group: Sequence[str], flat: Mapping[str, Mapping[str, Sequence[str]]]
    ) -> None:
        """The options of a group of parameters, which the step holds for each of them."""
        held = [flat[fqn] for fqn in group if fqn in flat]
        self._makers[f"{name}.params"] = lambda *_: _Made([fqn for fqn in group if fqn in flat])
        for option in dict.fromkeys(option for one in held for option in one):
            sources = [each for one in held for each in one.get(option, ())]

            def make(read: Read, _: int, sources: Sequence[str] = sources) -> _Made:
                first, *others = (read[each] for each in sources)
                if all(other == first for other in others):
                    return _Made(first)
                text = f"other groups of parameters: {sources[0]} and others differ"
                remedy = "divide the parameters among the groups of the optimizer as in the run"
                return _Made(first, (_Left("optimizer", text, remedy),))

            self._makers[f"{name}.{option}"] = make

    def _find_value(self, kind: str) -> None:
        """A scheduler or scaler: one value here, which the step may divide among entries."""
        root = self._only(kind, self._roots(kind, self._of_kind(kind)))
        if root is not None:
            own = state_of(getattr(self._parts, kind))
            below = self._take_below(root)
            self._makers[kind] = self._value_of(
                kind, root, below, own, lambda value: isinstance(value, Mapping | list)
            )

    def _value_of(
        self,
        kind: str,
        root: Path,
        entries: Iterable[_StepEntry],
        own: Any,
        is_of_class: Callable[[Any], bool],
    ) -> _Maker:
        """What makes the state of a part of some entries; another class leaves it in the step."""
        items = [(entry.path[len(root) :], entry.name) for entry in entries]

        def make(read: Read, _: int) -> _Made:
            value = _assembled([(tail, read[name]) for tail, name in items], own)
            if is_of_class(value):
                return _Made((value,))
            text = f"{kind} as {self._name_of(root)}, of the class {type(value).__name__}"
            part = type(getattr(self._parts, kind)).__name__
            remedy = f"a {part} does not load it; pass the object that saved it"
            return _Made(None, (_Left(kind, text, remedy),))

        return make

    def _find_dataloader(self) -> None:
        entries = self._of_kind("dataloader")
        own_rank = str(self._position.dp_rank)
        ranks = {one.kind.rank for one in entries} - {None}
        seen = [one for one in entries if one.kind.rank in (None, own_rank)]
        root = self._only("dataloader", self._roots("dataloader", seen or entries[:1]))
        if root is None:
            return
        with kept_random_states():
            own = self._parts.dataloader.state_dict()
        below = self._take_below(root, read=False)
        keys = {str(one.path[len(root)]) for one in below if len(one.path) > len(root)}
        # A loader that knows the states of all ranks by their keys takes them whole.
        takes_all = isinstance(own, Mapping) and not keys.isdisjoint(map(str, own))
        if ranks and not takes_all:
            self._take([one for one in entries if one.kind.rank is not None], read=False)
            below = [one for one in below if one.kind.rank == own_rank]
            fronts = {one.path[: len(root) + 1] for one in below}
            if not str(root[-1]).endswith(own_rank) and len(fronts) == 1:
                (root,) = fronts
            self._makers["train_state.dp_size"] = lambda *_: _Made(len(ranks))
        elif self._position.dp_size > 1:
            self._notes.append(
                f"the step holds one {self._name_of(root)} for all ranks; each continues from it"
            )
        self._to_read.update(one.name for one in below)
        is_global = self._parts.has_global_loader

        def is_of_class(value: Any) -> bool:
            names = {"global_batch", "position"}
            return not is_global or (isinstance(value, Mapping) and names <= value.keys())

        key = GLOBAL_DATA if is_global else self._position.data_key
        if below:
            made = self._value_of("dataloader", root, below, own, is_of_class)
            self._makers[f"dataloader.{key}"] = made

    def _find_random_states(self) -> None:
        entries = self._take(self._of_kind("rng"), read=False)
        n_ranks = self._beside.n_ranks
        if n_ranks:
            self._makers["train_state.world_size"] = lambda *_: _Made(n_ranks)
        elif not entries:
            self._notes.append("the step holds no random states: those of this process stay")
            return
        ranks = {one.kind.rank for one in entries} - {None}
        if ranks:
            self._makers["train_state.world_size"] = lambda *_: _Made(len(ranks))
            own_rank = str(self._position.rank)
            entries = [one for one in entries if one.kind.rank == own_rank]
        elif self._position.world_size > 1 and not n_ranks:
            self._notes.append("the step holds one random state for all ranks; each continues it")
        self._to_read.update(one.name for one in entries)

        def make(read: Read, _: int) -> _Made:
            states, unknown = states_in((one.name, read[one.name]) for one in entries)
            note, left = "", list[_Left]()
            if "torch" not in states:
                note = "the step holds no random state of torch: that of this process stays"
            if unknown:
                text = f"random states as {some_of(unknown)}, in a form that is not known"
                remedy = f"pass extra={{{unknown[0]!r}: ...}}, an object that restores them"
                left.append(_Left("rng", text, remedy))
            return _Made(({"state": states},), tuple(left), note)

        if entries:
            self._makers[f"rng.{self._position.rng_key}"] = make

    def _find_counts(self) -> None:
        for kind in ("step", "tokens", "samples"):
            names = []
            for entry in self._of_kind(kind):
                is_count_of_samples = kind == "tokens" and "sample" in str(entry.path[-1])
                if is_count_of_samples and kind not in self._mapped:
                    entry = self._take([entry])[0]
                    self._makers["train_state.samples"] = _count_of("samples", [entry.name])
                elif is_count_of_one_rank(entry.name):
                    self._take([entry], read=False)
                    self._notes.append(f"{entry.name} is the count of one rank: it is left out")
                else:
                    names += [one.name for one in self._take([entry])]
            if names:
                self._makers[f"train_state.{kind}"] = _count_of(kind, names)

    def _find_model(self) -> None:
        if self._parts.model is None:
            return
        roots: dict[tuple[str, ...], int] = defaultdict(int)
        in_shards = [one for one in self._entries.values() if one.entry is not None]
        of_model = [one for one in in_shards if one.kind.names[0] in ("model", "other")]
        for entry in of_model:
            words = tuple(entry.name.split("."))
            for n in range(len(words)):
                if self._parameter(".".join(words[n:])) in self._model:
                    roots[words[:n]] += 1
                    break
        if "model" in self._mapped:
            root = tuple(_dotted(self._mapped["model"]).split("."))
        else:
            best = [root for root in roots if roots[root] == max(roots.values())]
            averages = [root for root in best if any("ema" in word.split("_") for word in root)]
            best = [root for root in best if root not in averages] or best
            if len(best) > 1:
                self._only("model", best)
                return
            weights = [one.name for one in of_model if one.kind.names == ("model",)]
            if not best and weights and self._model:
                raise ModelDiffers(
                    f"the step holds model state of other names: {min(self._model)} of this job is "
                    f"not in it; it holds {weights[0]}, and was saved by a different model"
                )
            root = best[0] if best else ()
        self._front = root
        n_root = len(root)
        taken = ("model", "other") if root else ("model",)
        below = [entry for entry in in_shards if tuple(entry.name.split("."))[:n_root] == root]
        below = [
            entry
            for entry in below
            if entry.kind.names[0] in taken
            or self._parameter(_dotted(entry.tail(n_root))) in self._model
        ]
        for entry in self._take(below, read=False):
            tail = entry.tail(len(root))
            whole = self._parameter(_dotted(tail))
            if whole in self._model:
                self._place(entry, ("model", whole))
            else:
                self._place(entry, ("model", self._parameter(str(tail[0])), *tail[1:]))

    def _find_left(self) -> None:
        """What no kind of state of this job has taken."""
        beside: dict[str, None] = {}
        for file, why in self._beside.refused.items():
            remedy = "load it in the script, and pass what it holds in extra"
            self._left.append(_Left("extra", f"{file}, {why}", remedy))
        by_key: dict[str, list[_StepEntry]] = defaultdict(list)
        for entry in self._entries.values():
            by_key[entry.key].append(entry)
        for key, entries in by_key.items():
            may_be = [kind for one in entries for kind in one.kind.may_be]
            key = entries[0].name if may_be and len(entries) == 1 else key
            remedy = f"pass extra={{{key!r}: ...}}, an object that loads it"
            open_kinds = [kind for kind in dict.fromkeys(may_be) if self._is_open(kind)]
            if may_be:
                mapping = [f"names={{{kind!r}: {key!r}}} maps it" for kind in open_kinds[:1]]
                text = f"{key}, which is not recognized"
                self._left.append(_Left("extra", text, ", or ".join([*mapping, remedy])))
            elif state := [
                kind for entry in entries if (kind := entry.kind.names[0]) in STATE_KINDS
            ]:
                is_of_part = state[0] in PARTS and state[0] not in self._parts.given
                kind = state[0] if is_of_part else "extra"
                remedy = f"pass {kind}= to Checkpointer" if is_of_part else remedy
                what = "weights" if state[0] == "model" else state[0]
                self._left.append(_Left(kind, f"{what} as {key}", remedy))
            else:
                beside[key] = None
        for kind in ("optimizer", *_VALUES) if beside else ():
            if self._is_open(kind):
                text = f"{kind} under no known name, beside {some_of([*beside])}"
                remedy = (
                    f"names={{{kind!r}: KEY}} maps one of these; if none is it, "
                    f"accept_lost=({kind!r},) begins without"
                )
                self._left.append(_Left(kind, text, remedy))
        if beside:
            self._notes.append(
                f"left in the step, as no train state: {some_of([*beside])}; extra= loads what is "
                "named there"
            )

    def _is_open(self, kind: str) -> bool:
        """Whether this job takes state of a kind that was not found in the step."""
        if kind == "step":
            return "train_state.step" not in self._makers
        found = {name.partition(".")[0] for name in (*self._makers, *self._here)}
        found |= {one.kind for one in self._left}
        return kind in self._parts.given and kind not in found


def _count_of(kind: str, names: Sequence[str]) -> _Maker:
    """What makes one count of those in the step: the likeliest step, or the furthest."""

    def make(read: Read, number: int) -> _Made:
        counts, left = [], []
        for name in names:
            try:
                counts.append(int(read[name]))
            except (TypeError, ValueError):
                text = f"{kind} as {name}, which is no number"
                remedy = f"pass extra={{{name!r}: ...}}, an object that loads it"
                left.append(_Left("extra", text, remedy))
        return _Made(likeliest_step(counts, number if kind == "step" else None), tuple(left))

    return make


def _tail_in_optimizer(entry: _StepEntry, start: str, n_words: int) -> Path:
    """The parameter or group, and the name of the value; empty for what is of another form.

    Source: torch 2.13 `distributed/checkpoint/state_dict.py` (`flatten_optimizer_state_dict` puts
    a value under a key of its own).
    """
    rest = entry.name[len(start) :]
    if not rest.startswith(("state.", "param_groups.")):
        return ()
    tail = entry.tail(n_words)
    if len(tail) == 1 and not {"state", "param_groups"} & {*entry.path}:
        first, _, value = str(tail[0]).rpartition(".")
        return (first, value) if first else ()
    return tail if len(tail) > 1 else ()


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _shown(path: Path) -> str:
    """The name of a value in a file, whose path comes first."""
    return f"{path[0]}: {_dotted(path[1:])}" if path[1:] else str(path[0])


def _leaves_in(value: Any, path: Path = ()) -> Iterator[tuple[Leaf, Any]]:
    """The values in a file, as entries of a state: `leaves_of` for what was loaded."""
    import torch

    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        yield Leaf(path, dtype, tuple(value.shape)), value
        return
    stub = [*leaves_of(value, path)] if not isinstance(value, Mapping) else []
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _leaves_in(one, (*path, str(key)))
    elif len(stub) == 1 and stub[0].path == path:
        yield stub[0], value
    elif isinstance(value, list | tuple) and any(
        isinstance(one, Mapping | list | tuple | torch.Tensor) for one in value
    ):
        for number, one in enumerate(value):
            yield from _leaves_in(one, (*path, number))
    else:
        yield Leaf(path, content="plain"), value


def _assembled(items: Sequence[tuple[Path, Any]], own: Any, *, numbered: bool = False) -> Any:
    """A state of its entries, each with its path there; `own` is that of the object that takes it.

    DCP makes text of the keys of a dict, and loses an empty one: both are as in `own`. With
    `numbered`, keys that `own` lacks are numbers, as those of an optimizer are.
    """
    if len(items) == 1 and not items[0][0]:
        return items[0][1]
    children: dict[str | int, list[tuple[Path, Any]]] = defaultdict(list)
    for path, value in items:
        children[path[0]].append((path[1:], value))
    if all(isinstance(key, int) for key in children):
        held = own if isinstance(own, list | tuple) else ()
        return [
            _assembled(children[key], held[n] if n < len(held) else None, numbered=numbered)
            for n, key in enumerate(sorted(children, key=int))
        ]
    own = own if isinstance(own, Mapping) else {}
    made: Any = copy(own) if isinstance(own, MutableMapping) else {}
    made.clear()
    made.update(
        (key, copy(one)) for key, one in own.items() if isinstance(one, Mapping) and not one
    )
    by_text = {str(key): key for key in own}
    for text, below in children.items():
        is_number = numbered or (own and all(isinstance(key, int) for key in own))
        other: Any = int(text) if is_number and str(text).isdecimal() else text
        key = by_text.get(str(text), other)
        made[key] = _assembled(below, own.get(key), numbered=numbered)
    return made
