"""Find the train state of a step, and check that a resume has what it needs.

Train state is found by the keys of the entries and by the names of the files beside the
shards (`formats.frameworks.state_keys`). Where someone has read the small values, they are
shown; a missing value never makes a step worse. Whether the optimizer's shards belong to one
save is checked here too: it is the only trace that a save over an older step leaves in the
values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptctl.data_classes import dataclass, replace
from ckptctl.findings import Finding
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.state_keys import (
    StateKind,
    entry_kinds,
    is_count_of_one_rank,
    is_wrapper,
    kind_of_entry,
    optimizer_is_hollow,
)
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import command_line, inside, listed
from ckptctl.model import (
    STATE_KINDS,
    FileInfo,
    Metadata,
    StatePart,
    TrainState,
)

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Sources:
    """Where train state can be: metadata by part, files beside the shards, and values read.

    `sidecars` are files outside the tensor parts. `contents` are the decoded top
    levels of those sidecars that were read, `numbers` the values of scalar entries
    by (part, FQN).
    """

    layout: str
    metadata: Sequence[tuple[str, Metadata]]
    sidecars: Sequence[FileInfo]
    contents: Mapping[str, object]
    numbers: Mapping[tuple[str, str], int]


NO_STATE = TrainState(**{kind: StatePart(False) for kind in STATE_KINDS})
"""What is known of a step that could not be inspected."""


@dataclass(slots=True)
class _Found:
    where: list[str]
    ranks: set[str]
    value: int | None = None


def train_state(sources: Sources) -> TrainState:
    """Which kinds of train state are there, where, and for how many ranks.

    Cost: one comparison per name; nothing is read.
    """
    found: dict[str, _Found] = defaultdict(lambda: _Found([], set()))
    for part, metadata in sources.metadata:
        _from_entries(found, part, metadata, sources.numbers)
    read: dict[tuple[str, ...], Mapping[str, int | None]] = {}
    for file in sources.sidecars:
        kind = kind_of_file(sources.layout, file.path)
        if file.path in sources.contents:
            held = _held_by(sources.contents[file.path], kind)
            if kind is not None and kind.rank is not None:
                read.setdefault(kind.names, held)
        elif kind is not None and file.size > 0:
            # Of files that exist once per rank, one is read and stands for the others.
            known = read.get(kind.names, ()) if kind.rank is not None else ()
            held = dict.fromkeys(known or kind.names)
        else:
            continue
        for name, value in held.items():
            _note(found[name], file.path, kind.rank if kind else None, value)
    state = TrainState(**{kind: _state_part(found.get(kind)) for kind in STATE_KINDS})
    if any(is_count_of_one_rank(where) for where in state.tokens.where):
        n_ranks, own = state.dataloader.n_ranks, state.tokens.value
        total = own * n_ranks if own is not None and n_ranks else None
        return replace(state, tokens=replace(state.tokens, value=total, of_each_rank=own))
    return state


def _state_part(found: _Found | None) -> StatePart:
    if found is None or not found.where:
        return StatePart(False)
    return StatePart(
        True, tuple(sorted(set(found.where))[:_EXAMPLES]), len(found.ranks) or None, found.value
    )


def _note(found: _Found, where: str, rank: str | None, value: int | None = None) -> None:
    found.where.append(where)
    if rank is not None:
        found.ranks.add(rank)
    if value is not None:
        # Trainers count within an epoch or a phase too: the run's own count is the furthest.
        found.value = max(value, found.value or 0)


def _from_entries(
    found: dict[str, _Found], part: str, metadata: Metadata, numbers: Mapping[tuple[str, str], int]
) -> None:
    kinds = entry_kinds(metadata, part)
    names = [fqn for fqn, kind in kinds.items() if kind.names == ("optimizer",)]
    hollow = optimizer_is_hollow((*_path(metadata, fqn), fqn) for fqn in names)
    for fqn, kind in kinds.items():
        name = kind.names[0]
        if name not in STATE_KINDS or (name == "optimizer" and hollow):
            continue
        where = inside(part, fqn)
        _note(found[name], where, kind.rank, numbers.get((part, fqn)))


def _path(metadata: Metadata, fqn: str) -> Sequence[str | int]:
    entry = metadata.tensors.get(fqn) or metadata.bytes_entries[fqn]
    return entry.path or (fqn,)


def _held_by(content: object, by_name: StateKind | None) -> Mapping[str, int | None]:
    """The kinds that a decoded file holds, with the value of a step or token count."""
    names = by_name.names if by_name else ()
    if not isinstance(content, Mapping):
        return dict.fromkeys(names)
    always = by_name.always if by_name else ()
    held: dict[str, int | None] = dict.fromkeys(names if len(names) == 1 else always)
    for key, value in content.items():
        if is_wrapper(str(key)) and isinstance(value, Mapping):
            held |= _held_by(value, None)
            continue
        name = kind_of_entry((str(key),)).names[0]
        if name == "other" and by_name is None and _is_weight(value):
            name = "model"  # a bare state dict
        if name not in STATE_KINDS or _is_empty(value) or (name == "tokens" and value == 0):
            continue  # a count of 0 tokens was never switched on
        held.setdefault(name, None)
        # Beside its RNG states accelerate counts the batches of the epoch, not training steps.
        if name in ("step", "tokens") and type(value) is int and names != ("rng",):
            held[name] = max(value, held[name] or 0)
    return held


def _is_weight(value: object) -> bool:
    return isinstance(value, TensorStub) and bool(value.shape) and "float" in value.dtype


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple, dict, str)) and not value)


def check_required(state: TrainState, require: Iterable[str], url: str) -> Iterator[Finding]:
    """Yield one `state.missing` that lists what a resume would not restore.

    `require` are the kinds that the caller asked for; the message states which of
    them are missing. Yields nothing where everything is there.
    """
    missing = [kind for kind in STATE_KINDS if kind not in state.held]
    if not missing:
        return
    required = [kind for kind in require if kind in missing]
    message = f"a resume from here does not restore {listed(missing)}"
    if required:
        message += f"; {listed(required)} is required"
    yield Finding(
        "state.missing",
        ", ".join(missing),
        message,
        expected=listed(list(require)) if required else listed(STATE_KINDS),
        found=listed(state.held) or "nothing",
        next_command=command_line("show", url),
    )


def check_optimizer_steps(
    steps: Mapping[str, Sequence[tuple[str, float]]], url: str
) -> Iterator[Finding]:
    """Yield `state.mixed` where the shard files were written at different steps.

    `steps` holds, for each optimizer, the `step` value of each parameter with the
    shard file that holds it. An optimizer counts every parameter alike, but for
    those that got no gradient for a while: their counts differ inside a file too.
    A finding therefore needs two files, each of one mind in two values or more,
    that disagree.
    """
    for optimizer, values in sorted(steps.items()):
        by_file: dict[str, list[float]] = defaultdict(list)
        for file, value in values:
            by_file[file].append(value)
        firm = {
            file: found[0]
            for file, found in by_file.items()
            if len(found) >= 2 and len(set(found)) == 1
        }
        agreed = all(len(set(found)) == 1 for found in by_file.values())
        if not agreed or len(set(firm.values())) < 2:
            continue
        # Of as many files on either side, the older ones were left by an earlier save.
        usual, _ = max(Counter(firm.values()).items(), key=lambda one: (one[1], one[0]))
        odd = {file: value for file, value in sorted(firm.items()) if value != usual}
        file, value = next(iter(odd.items()))
        yield Finding(
            "state.mixed",
            file,
            f"{optimizer} was at step {value:g} when {file} was written, and at step "
            f"{usual:g} when the others were: a save over an older step was interrupted",
            expected=f"step {usual:g} in every shard file",
            found=", ".join(f"{name}: {step:g}" for name, step in list(odd.items())[:_EXAMPLES]),
            next_command=command_line("show", url),
        )
