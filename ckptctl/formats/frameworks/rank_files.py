"""The files of a rank-file step: which ranks and kinds their names state, and what is missing.

A rank-file checkpoint has no metadata. Each rank writes one `torch.save` file of each
kind, and the name of a file states its place in a grid of ranks. The files that exist
therefore state which others must exist. Nothing is read here.

Source: verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`; DeepSpeed 0.19.8
`runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`) and
`runtime/pipe/module.py`; Megatron-LM `training/checkpointing.py` (`get_checkpoint_name`);
transformers 5.23 `trainer.py` (`_save_rng_state`); accelerate 1.15 `checkpointing.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from math import prod

from ckptctl.model import FileInfo

_N = "[0-9]{1,6}"

# Layout, what the file holds, its name. Named groups are the axes of the grid; an axis `of_…`
# states the length of another, and each value of an axis `each_…` has a grid of its own.
_KINDS = (
    ("verl", "model", rf"model_world_size_(?P<of_rank>{_N})_rank_(?P<rank>{_N})\.pt"),
    ("verl", "optimizer", rf"optim_world_size_(?P<of_rank>{_N})_rank_(?P<rank>{_N})\.pt"),
    ("verl", "extra state", rf"extra_state_world_size_(?P<of_rank>{_N})_rank_(?P<rank>{_N})\.pt"),
    ("verl data", "dataloader", rf"data_(?P<rank>{_N})\.pt"),
    (
        "deepspeed",
        "optimizer",
        rf"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>{_N})_mp_rank_(?P<mp>{_N})_optim_states\.pt",
    ),
    (
        "deepspeed",
        "sharded model",
        rf"zero_pp_rank_(?P<dp>{_N})_mp_rank_(?P<mp>{_N})_model_states\.pt",
    ),
    ("deepspeed", "model", rf"mp_rank_(?P<mp>{_N})_model_states\.pt"),
    (
        "deepspeed layers",
        "layer",
        rf"layer_(?P<each_layer>{_N})-model_(?P<tp>{_N})-model_states\.pt",
    ),
    (
        "deepspeed experts",
        "experts",
        rf"layer_(?P<each_layer>{_N})_expert_(?P<expert>{_N})_mp_rank_(?P<mp>{_N})_model_states\.pt",
    ),
    (
        "deepspeed experts",
        "optimizer of the experts",
        rf"expp_rank_(?P<ep>{_N})_mp_rank_(?P<mp>{_N})_optim_states\.pt",
    ),
    *(
        (
            "megatron-legacy",
            what,
            rf"mp_rank_(?P<tp>{_N})(?:_(?P<pp>{_N}))?(?:_(?P<ep>{_N}))?/{file}\.pt",
        )
        for what, file in (
            ("model", "(?:model_optim_rng|model_rng)"),
            ("optimizer", "(?:distrib_optim|optim)"),
        )
    ),
    ("transformers", "RNG states", rf"rng_state_(?P<rank>{_N})\.pth"),
    ("accelerate", "RNG states", rf"random_states_(?P<rank>{_N})\.pkl"),
)

_STATED = "of_"
_APART = "each_"

_LEAST: Mapping[str, int] = {"transformers": 2}
"""Ranks that a numbered name implies: alone, transformers writes `rng_state.pth`."""

_DATA_PARALLEL = ("rank", "dp")
"""Axes that, with the others, count every rank; a grid without one counts model-parallel ranks."""

_SHARDED = ("verl", "deepspeed", "megatron-legacy")
"""Layouts whose files hold shards, which only as many ranks can load."""

CONVERSIONS: Mapping[str, str] = {
    "verl": "python -m verl.model_merger merge --backend fsdp --local_dir {step} --target_dir OUT",
    "deepspeed": "ds_to_universal --input_folder {step} --output_folder {step}-universal",
    "megatron-legacy": "python tools/checkpoint/convert.py --model-type GPT --loader mcore "
    "--saver mcore --load-dir {root} --save-dir OUT --target-tensor-parallel-size N",
}
"""The framework's own way to another number of ranks."""


@dataclass(frozen=True, slots=True)
class Family:
    """The files of one kind in one folder: how many the grid has, and which are missing."""

    layout: str
    """The framework."""
    what: str
    """What each file holds: `model`, `optimizer`, …"""
    folder: str
    """Where they are in the step, with a slash at the end; empty for the step itself."""
    n_files: int
    """How many the grid has."""
    n_present: int
    """How many of them exist."""
    missing: tuple[str, ...]
    """The paths of the first that are missing, at most `MAX_NAMED`."""
    n_ranks: int | None
    """How many ranks wrote them; None where the names count only model-parallel ranks."""
    stated: bool
    """The names state the number of ranks; otherwise the highest rank found does."""
    ranks: frozenset[int]
    """The ranks that have their file; none where `n_ranks` is None."""

    @property
    def sharded(self) -> bool:
        """The files hold shards: only as many ranks can load them."""
        return self.layout in _SHARDED


MAX_NAMED = 8

MAX_STATED = 1_000_000

STATED_INSIDE: Mapping[str, str] = {"dp_world_size": "dp", "mp_world_size": "mp"}
"""Keys of DeepSpeed's model states that state the length of an axis."""


@dataclass(frozen=True, slots=True)
class _Named:
    """One file, by its place in the grid."""

    what: str
    axes: Mapping[str, int]
    match: re.Match[str]

    @property
    def of_ranks(self) -> int | None:
        """How many ranks the name states."""
        return next((n for axis, n in self.axes.items() if axis.startswith(_STATED)), None)

    @property
    def kind(self) -> tuple[object, ...]:
        """Files of one kind differ in their place in the grid alone."""
        apart = [(axis, n) for axis, n in self.axes.items() if axis.startswith(_APART)]
        return (self.what, tuple(self.grid_axes), *apart)

    @property
    def grid_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if not axis.startswith((_STATED, _APART)))

    @property
    def place(self) -> tuple[int, ...]:
        return tuple(self.axes[axis] for axis in self.grid_axes)


def rank_in_name(path: str) -> int | None:
    """The rank in the name of a rank file; None for one that names several axes, or none."""
    found = _matched(path)
    if found is None:
        return None
    _, named = found
    return named.axes.get("rank")


def families(
    files: Iterable[FileInfo], stated: Mapping[str, int] | None = None
) -> tuple[Family, ...]:
    """The kinds of rank files among the files of a step, each with what its grid lacks.

    `stated` are the lengths of axes that the content of a file states. All kinds of one
    framework in one folder share the lengths of their axes. Files that state different
    world sizes were written by different attempts, and are apart. Cost: one match of each
    name; a grid that names claim to be huge is counted, not listed.
    """
    grids: dict[tuple[str, str, int | None], list[_Named]] = defaultdict(list)
    for file in files:
        found = _matched(file.path)
        if found is not None and file.kind == "file":
            layout, named = found
            folder = named.match["folder"]
            grids[layout, folder, named.of_ranks].append(named)
    return tuple(
        family
        for (layout, folder, _), members in sorted(grids.items(), key=lambda one: str(one[0]))
        for family in _families_of(layout, folder, members, stated or {})
    )


@lru_cache(maxsize=1 << 14)
def _matched(path: str) -> tuple[str, _Named] | None:
    # Several checks of one inspection compute the families of the same names.
    for layout, what, name in _KINDS:
        match = re.fullmatch(rf"(?P<folder>(?:[^/]+/)*){name}", path)
        if match:
            axes = {axis: int(n) for axis, n in match.groupdict().items() if axis != "folder" and n}
            return layout, _Named(what, axes, match)
    return None


def _families_of(
    layout: str, folder: str, members: Sequence[_Named], stated: Mapping[str, int]
) -> Iterator[Family]:
    lengths: dict[str, int] = defaultdict(lambda: _LEAST.get(layout, 1), stated)
    for member in members:
        for axis, n in member.axes.items():
            if axis.startswith(_STATED):
                lengths[axis.removeprefix(_STATED)] = max(n, lengths[axis.removeprefix(_STATED)])
            elif not axis.startswith(_APART):
                lengths[axis] = max(n + 1, lengths[axis])
    kinds: dict[tuple[object, ...], list[_Named]] = defaultdict(list)
    for member in members:
        kinds[member.kind].append(member)
    for alike in kinds.values():
        yield _family(layout, folder, alike, lengths)


def _family(
    layout: str, folder: str, alike: Sequence[_Named], lengths: Mapping[str, int]
) -> Family:
    first = min(alike, key=lambda member: member.match.string)
    axes = first.grid_axes
    there = {member.place for member in alike}
    numbers = {_number(place, [lengths[axis] for axis in axes]) for place in there}
    places = product(*(range(lengths[axis]) for axis in axes))
    missing = (place for place in places if place not in there)
    counts_all = any(axis in _DATA_PARALLEL for axis in axes)
    n_files = prod(lengths[axis] for axis in axes)
    return Family(
        layout,
        first.what,
        folder,
        n_files,
        len(there),
        tuple(_name_at(first, place) for place in islice(missing, MAX_NAMED)),
        n_files if counts_all else None,
        first.of_ranks is not None,
        frozenset(numbers) if counts_all else frozenset(),
    )


def _number(place: Sequence[int], lengths: Sequence[int]) -> int:
    """The rank at a place of the grid: the last axis varies fastest."""
    number = 0
    for n, length in zip(place, lengths, strict=True):
        number = number * length + n
    return number


def _name_at(member: _Named, place: Sequence[int]) -> str:
    """The path of the file at another place of the grid, from that of one that exists."""
    text, match = member.match.string, member.match
    for axis, n in sorted(
        zip(member.grid_axes, place, strict=True), key=lambda one: match.start(one[0]), reverse=True
    ):
        start, end = match.span(axis)
        text = text[:start] + str(n).zfill(_width(match[axis])) + text[end:]
    return text


def _width(digits: str) -> int:
    # Names are padded with zeros where a framework pads them: `mp_rank_00`, `rank_0`.
    return len(digits) if digits.startswith("0") else 1
