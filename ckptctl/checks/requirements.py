"""Check what a resume needs of a step: train state, and a world size that can load it.

Train state is found by the keys of the entries and by the names of the files beside the
shards (`formats.frameworks.state_keys`). Where someone has read the small values, they are
shown; a missing value never makes a step worse. Whether the optimizer's shards belong to one
save is checked here too: it is the only trace that a save over an older step leaves in the
values.

The metadata does not state the world size that wrote a step. The names of the shard files do
in a clean folder, where every rank leaves a file even if it had nothing to write; elsewhere
they give a lower bound. No check here calls a step damaged for its number of files, unless
the caller states how many ranks wrote it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckptctl.data_classes import dataclass, replace
from ckptctl.findings import Finding
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.grids import CONVERSIONS
from ckptctl.formats.frameworks.layouts import (
    hugging_face_rank,
    is_stage,
    rank_local_rank,
    shard_rank,
)
from ckptctl.formats.frameworks.state_keys import (
    StateKind,
    entry_kinds,
    is_count_of_one_rank,
    is_wrapper,
    kind_of_entry,
    optimizer_is_hollow,
)
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import command_line, inside, listed, some_of, verb
from ckptctl.model import (
    SHARDED,
    STATE_KINDS,
    FileInfo,
    Metadata,
    Part,
    PartFormat,
    StatePart,
    TrainState,
    WorldSize,
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


_WITH_RANKS = SHARDED | {PartFormat.SAFETENSORS}
_RANK_READERS = (shard_rank, rank_local_rank, hugging_face_rank)


def ranks_in(part: Part, named: Collection[str] | None = None) -> frozenset[int]:
    """The ranks that left a shard file or rank-local metadata in a part, or all their rank files.

    `named` are the shard files that the part's metadata names. A file with bytes
    that it does not name was left by another save, and does not count for this one.
    """
    if part.grids:
        counted_all = [one for one in part.grids if one.n_ranks is not None]
        lacking = [one for one in counted_all if one.n_present < one.n_files]
        return frozenset(
            rank
            for one in counted_all
            for rank in one.ranks
            if all(rank in other.ranks or rank >= other.n_files for other in lacking)
        )
    names = [file.path for file in part.files if not _is_left_over(file, named)]
    names += named or ()  # a file that is missing was written by someone too
    found = (read(name) for name in names for read in _RANK_READERS)
    return frozenset(rank for rank in found if rank is not None)


def _is_left_over(file: FileInfo, named: Collection[str] | None) -> bool:
    is_shard = shard_rank(file.path) is not None
    return named is not None and is_shard and file.size > 0 and file.path not in named


def saved_world_size(
    parts: Sequence[Part], named: Mapping[str, Collection[str]], state: TrainState
) -> WorldSize | None:
    """How many ranks wrote the step, and where that was read from; None where nothing states it.

    `named` are the shard files that the metadata of each part names, by its path,
    without the parts whose metadata does not state it. Pipeline stages number their
    ranks from 0 each, so they add up; other parts are written by the same ranks.
    State that exists once per rank can show more ranks than the shard files do.
    """
    sharded = [part for part in parts if part.format in _WITH_RANKS]
    ranks = {part.path: ranks_in(part, named.get(part.path)) for part in sharded}
    stages = [found for path, found in ranks.items() if is_stage(path)]
    others = [found for path, found in ranks.items() if not is_stage(path)]
    by_files = max(
        sum(len(found) for found in stages),
        max((max(found, default=-1) + 1 for found in others), default=0),
    )
    # A rank with nothing to write leaves no safetensors file: such a part states the size
    # only where no other does, and not for sure.
    telling = [part for part in sharded if part.format is not PartFormat.SAFETENSORS]
    of_rank_files = {part.path: n for part in parts if (n := _rank_files(part))}
    telling += [part for part in parts if part.path in of_rank_files]
    unclear = not telling or any(
        len(ranks.get(part.path, ())) <= max(ranks.get(part.path, ()), default=-1)
        or any(_is_left_over(file, named.get(part.path)) for file in part.files)
        for part in telling
    )
    by_files = max(by_files, *of_rank_files.values(), 0)
    by_state = max(state.rng.n_ranks or 0, state.dataloader.n_ranks or 0)
    if by_state > by_files:
        return WorldSize(by_state, "train-state", at_least=True)
    if by_files == 0:
        return None
    return WorldSize(by_files, "shard-files", at_least=unclear)


def _rank_files(part: Part) -> int:
    """How many ranks the names of rank files state; 0 for none."""
    return max((one.n_ranks or 0 for one in part.grids), default=0)


def check_saved_world_size(parts: Sequence[Part], expected: int, url: str) -> Iterator[Finding]:
    """Yield `shard.missing` for each part that lacks a shard file of one of `expected` ranks.

    Pipeline stages share the ranks among them and are counted together.
    """
    for part in parts:
        n_ranks = _rank_files(part)
        if 0 < n_ranks < expected:
            yield _too_few("the step", f"files of {n_ranks} ranks", expected, part.path, url)
    sharded = [part for part in parts if part.format in _WITH_RANKS]
    stages = [part for part in sharded if is_stage(part.path)]
    n_in_stages = sum(len(ranks_in(part)) for part in stages)
    if stages and n_in_stages < expected:
        yield _too_few("the stages", f"{n_in_stages} ranks", expected, "", url)
    for part in sharded:
        if is_stage(part.path):
            continue
        there = ranks_in(part)
        missing = [rank for rank in range(expected) if rank not in there]
        if missing and (there or part.format is not PartFormat.SAFETENSORS):
            what = f"no shard file of rank {some_of(missing, 8)}"
            yield _too_few(part.path or "the step", what, expected, part.path, url)


def _too_few(what: str, found: str, expected: int, where: str, url: str) -> Finding:
    return Finding(
        "shard.missing",
        where,
        f"{expected} ranks wrote the step, but in {what} there is {found}",
        expected=f"shard files of {expected} ranks",
        found=found,
        next_command=command_line("verify", url),
    )


def check_world_size(
    parts: Sequence[Part], state: TrainState, saved: WorldSize | None, wanted: int, url: str
) -> Iterator[Finding]:
    """Yield what loading at `wanted` ranks needs, or what it would lose.

    `world-size.fixed` where it cannot be loaded, `state.lost` for state that exists
    once per rank, `world-size.differs` where DCP reshards while loading. Nothing
    where the step was written by as many ranks.
    """
    if saved is not None and saved.size == wanted and not saved.at_least:
        return
    fixed = [part for part in parts if _is_fixed(part, wanted)]
    if fixed:
        yield _fixed(fixed[0], saved, wanted, url)
        return
    lost = [
        kind
        for kind in ("rng", "dataloader")
        if (n_ranks := state.part(kind).n_ranks) is not None and n_ranks != wanted
    ]
    if lost:
        counts = ", ".join(f"{kind} for {state.part(kind).n_ranks} ranks" for kind in lost)
        yield Finding(
            "state.lost",
            ", ".join(lost),
            f"{listed(lost)} {verb(len(lost), 'exists', 'exist')} once per rank ({counts}) and "
            f"cannot be restored on {wanted} ranks: data would be repeated or skipped",
            expected=f"one copy for each of {wanted} ranks",
            found=counts,
            next_command=command_line("show", url),
        )
    written = _count(saved)
    yield Finding(
        "world-size.differs",
        "",
        f"written by {written}, to be loaded by {wanted} ranks: "
        + ("DCP reshards while loading" if _is_dcp(parts) else "no file holds a shard"),
        expected=f"{wanted} ranks",
        found=written,
    )


def _is_dcp(parts: Sequence[Part]) -> bool:
    return any(part.format in SHARDED for part in parts)


def _is_fixed(part: Part, wanted: int) -> bool:
    """Whether only as many ranks can load a part as wrote it.

    Names that count model-parallel ranks alone leave the data-parallel size free.
    """
    if part.format is PartFormat.RANK_FILES:
        sharded = (one for one in part.grids if one.sharded)
        return any(
            one.n_ranks != wanted if one.n_ranks else wanted % one.n_files for one in sharded
        )
    return part.format not in (PartFormat.DCP, PartFormat.SAFETENSORS)


def _fixed(part: Part, saved: WorldSize | None, wanted: int, url: str) -> Finding:
    next_command = command_line("show", url)
    if part.format is PartFormat.DCP_RANK_LOCAL:
        why = (
            "every rank wrote its own metadata, and a load at another world size gives "
            "wrong values without an error"
        )
    elif part.format is PartFormat.RANK_FILES:
        layout = next(one.framework for one in part.grids if one.sharded)
        why = f"each rank has shards of its own ({layout})"
        next_command = CONVERSIONS[layout].format(step=url, root=url.rpartition("/")[0])
    else:
        why = f"{part.format.value} checkpoints cannot be resharded while loading"
    return Finding(
        "world-size.fixed",
        part.path,
        f"cannot be loaded on {wanted} ranks: {why}",
        expected=f"{wanted} ranks",
        found=_count(saved),
        next_command=next_command,
    )


def _count(saved: WorldSize | None) -> str:
    if saved is None:
        return "an unknown number of ranks"
    return f"{'at least ' if saved.at_least else ''}{saved.size} ranks"
