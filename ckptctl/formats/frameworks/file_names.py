"""The names of the files that hold train state: what each holds, and whose rank it is of.

One table. A row states what a file of that name holds, which axes of a grid of ranks the name
states, and what the file is called where it lies in a root without a step number. The first
row that matches decides. Nothing is read here.

A rank-file checkpoint has no metadata. Each rank writes one `torch.save` file of each kind,
and the name of a file states its place in a grid of ranks. The files that exist therefore
state which others must exist: `grids_of` returns the grids, each with what it lacks.

Source: verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`; DeepSpeed 0.19.8
`runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`) and
`runtime/pipe/module.py`; Megatron-LM `training/checkpointing.py` (`get_checkpoint_name`);
transformers 5.23 `trainer.py` (`_save_rng_state`); accelerate 1.15 `checkpointing.py`; the
sidecars of torchtitan, KempnerForge, OLMo-core, Lightning, nanotron, ByteCheckpoint, NeMo.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice, product
from math import prod
from typing import NamedTuple

from ckptctl.data_classes import dataclass
from ckptctl.formats.frameworks.state_keys import Kind
from ckptctl.model import FileInfo, Grid


class FileName(NamedTuple):
    """A name, below the step, and what it states."""

    name: str
    """Matched against the whole path. The groups other than `folder` are axes of the grid: an
    axis `of_…` states the length of another, each value of an axis `each_…` has a grid of its
    own, and `again_…` repeats another axis."""
    holds: str = ""
    """Kinds of train state. A file of several is believed until it is read, but for those with
    a `+`, which it restores whatever its keys are: by the count of steps these trainers find
    their place in the data."""
    layout: str = ""
    """The only layout of steps in which the name means this; empty for all."""
    grid: str = ""
    """Whose ranks the axes count; empty for a name that states none."""
    what: str = ""
    """What each file of the grid holds, for messages; empty for `BY_RANK`, where the name does."""
    weights: str = ""
    """What it is called in a root without a step number; empty for a file without weights."""


_N = "[0-9]{1,6}"
_IN = r"(?P<folder>(?:.*/)?)"
_FILE = r"\.(?:pt|pth|pkl|bin)"
_COUNTED = "step scheduler tokens +dataloader"

BY_RANK = "rank in the name"
"""The grid of files that no framework names, and whose names differ by the number of a rank."""

_OTHER_RANK = r"(?<![a-z])(?:[dtpcems]p|local|node|group|replica|low|lora)[-_.]?rank"
"""Numbers that are not those of every rank: of one axis, within a node, of a matrix. `_r8` is no
rank at all: it is as often the size of an adapter or a revision."""

_VERL = rf"_world_size_(?P<of_rank>{_N})_rank_(?P<rank>{_N})\.pt"
_MP = rf"mp_rank_(?P<mp>{_N})"
# Its folders are places in the grid, so that the folder in front is the shortest that matches.
_ABOVE = r"(?P<folder>(?:.*?/)??)"
_MP_FOLDER = rf"mp_rank_(?P<tp>{_N})(?:_(?P<pp>{_N}))?(?:_(?P<ep>{_N}))?/"
_MEGATRON = rf"{_ABOVE}(?:{_MP_FOLDER})?"
# verl wrote Megatron's state this way until 0.4. Of the optimizer, one rank of each
# model-parallel one writes.
_PP_TP = rf"pp(?P<pp>{_N})_tp(?P<tp>{_N})"
_UNIVERSAL = "deepspeed-universal"
_DEEPSPEED_WEIGHTS = "a DeepSpeed checkpoint"
_MEGATRON_WEIGHTS = "a Megatron checkpoint"
_TORCH_WEIGHTS = "a torch.save checkpoint"
_SAYS_WEIGHTS = (
    r"(?:.*[-_.])?(?:ckpt|checkpoint|snapshot|last|latest|best|final|model|optimizer|optim|weights"
    r"|state|state_dict|params|ema|rank)(?:[-_.0-9].*)?"
)

FILES = (
    FileName(
        rf"{_IN}model{_VERL}",
        "+model +step",
        grid="verl",
        what="model",
        weights=_TORCH_WEIGHTS,
    ),
    FileName(
        rf"{_IN}optim{_VERL}", "optimizer", grid="verl", what="optimizer", weights=_TORCH_WEIGHTS
    ),
    FileName(rf"{_IN}extra_state{_VERL}", "rng scheduler", grid="verl", what="extra state"),
    FileName(rf"{_IN}data_(?P<rank>{_N})\.pt", "dataloader", "verl", "verl data", "dataloader"),
    FileName(rf"{_IN}data\.pt", "dataloader", "verl"),
    FileName(
        rf"{_IN}(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>{_N})_{_MP}_?optim_states\.pt",
        "optimizer",
        grid="deepspeed",
        what="optimizer",
        weights=_DEEPSPEED_WEIGHTS,
    ),
    FileName(r"zero/[^/]+/fp32\.pt", "model", _UNIVERSAL),
    FileName(r"zero/.+\.pt", "optimizer", _UNIVERSAL),
    FileName(
        rf"{_IN}zero_pp_rank_(?P<dp>{_N})_{_MP}_model_states\.pt",
        "step scheduler",
        _UNIVERSAL,
        "deepspeed universal",
        "state of the ranks",
    ),
    FileName(
        rf"{_IN}{_MP}_model_states\.pt",
        "step scheduler",
        _UNIVERSAL,
        "deepspeed universal",
        "state of the model-parallel ranks",
    ),
    FileName(
        rf"{_IN}zero_pp_rank_(?P<dp>{_N})_{_MP}_model_states\.pt",
        "model step scheduler",
        grid="deepspeed",
        what="sharded model",
        weights=_DEEPSPEED_WEIGHTS,
    ),
    FileName(
        rf"{_IN}{_MP}_model_states\.pt",
        "model step scheduler",
        grid="deepspeed",
        what="model",
        weights=_DEEPSPEED_WEIGHTS,
    ),
    FileName(
        rf"{_IN}layer_(?P<each_layer>{_N})-model_(?P<tp>{_N})-model_states\.pt",
        "model",
        grid="deepspeed layers",
        what="layer",
        weights=_DEEPSPEED_WEIGHTS,
    ),
    FileName(
        rf"{_IN}(?:layer_(?P<each_layer>{_N})_)?expert_(?P<expert>{_N})_{_MP}_model_states\.pt",
        "model",
        grid="deepspeed experts",
        what="experts",
        weights=_DEEPSPEED_WEIGHTS,
    ),
    FileName(
        rf"{_IN}expp_rank_(?P<ep>{_N})_{_MP}_optim_states\.pt",
        "optimizer",
        grid="deepspeed experts",
        what="optimizer of the experts",
        weights=_DEEPSPEED_WEIGHTS,
    ),
    FileName(r"zero_to_fp32\.py", weights=_DEEPSPEED_WEIGHTS),
    FileName(
        rf"{_MEGATRON}model_optim_rng\.pt",
        "model optimizer rng scheduler step +dataloader",
        grid="megatron-legacy",
        what="model",
        weights=_MEGATRON_WEIGHTS,
    ),
    FileName(
        rf"{_MEGATRON}model_rng\.pt",
        "model rng scheduler step +dataloader",
        grid="megatron-legacy",
        what="model",
        weights=_MEGATRON_WEIGHTS,
    ),
    FileName(
        rf"{_MEGATRON}(?:distrib_)?optim\.pt",
        "optimizer",
        grid="megatron-legacy",
        what="optimizer",
        weights=_MEGATRON_WEIGHTS,
    ),
    FileName(
        rf"{_ABOVE}model/{_MP_FOLDER}model\.pt", "model", "verl", "verl-megatron", "sharded model"
    ),
    FileName(
        rf"{_ABOVE}optim/distrib_optim_{_PP_TP}_cp{_N}_dp{_N}\.pt",
        "optimizer",
        "verl",
        "verl-megatron",
        "optimizer",
    ),
    FileName(
        rf"{_ABOVE}rng_states/rng_states_{_PP_TP}_cp(?P<cp>{_N})_dp(?P<dp>{_N})\.pt",
        "rng",
        "verl",
        "verl-megatron",
        "RNG states",
    ),
    FileName(
        rf"{_IN}pytorch_model_fsdp(?:_(?P<each_model>{_N}))?_rank(?P<rank>{_N})\.bin",
        "model",
        grid="accelerate-fsdp",
        what="model",
        weights="Hugging Face weights",
    ),
    FileName(
        rf"{_IN}optimizer(?:_(?P<each_optimizer>{_N}))?_rank(?P<rank>{_N})\.bin",
        "optimizer",
        grid="accelerate-fsdp",
        what="optimizer",
    ),
    FileName(rf"{_IN}rng_state_(?P<rank>{_N})\.pth", "rng", grid="transformers", what="RNG states"),
    FileName(
        rf"{_IN}random_states_(?P<rank>{_N})\.pkl", "rng", grid="accelerate", what="RNG states"
    ),
    # torchtune derives the schedule and the place in the data from the number of epochs.
    FileName(rf"{_IN}recipe_state\.pt", "optimizer +step +scheduler +dataloader", "torchtune"),
    FileName(r"train_state\.pt", "step tokens rng scheduler dataloader", "kempnerforge"),
    FileName(r"train_state\.pt", "step tokens", "megatron-bridge"),
    FileName(r"meta\.pt", "step scheduler", "lightning"),
    FileName(r"common\.pt", _COUNTED, "megatron"),
    FileName(r"common\.pt", _COUNTED, "megatron-bridge"),
    FileName(r"weights/common\.pt", _COUNTED, "nemo"),
    FileName(r"train/rank(?P<rank>[0-9]+)\.pt", "step tokens rng dataloader", "olmo-core"),
    FileName(r"extra_state/.*rank_?(?P<rank>[0-9]+).*", "rng scheduler", "bytecheckpoint"),
    FileName(r"loader(?:_ckpt)?/.*rank_?(?P<rank>[0-9]+).*", "dataloader", "bytecheckpoint"),
    FileName(r"checkpoint_metadata\.json", "step tokens", "nanotron"),
    FileName(r"random/(?P<rank>[^/]+)\.pt", "rng", "nanotron"),
    FileName(r"optimizer/[^/]+\.pt", "optimizer", "nanotron"),
    FileName(r"step_scheduler\.pt", "step", "automodel"),
    FileName(r"training_state\.pt", "optimizer scheduler step"),
    FileName(r"trainer_state\.json", "step +dataloader"),
    FileName(rf"{_IN}(?:random_states?|rng_states?)_(?P<rank>[0-9]+){_FILE}", "rng"),
    FileName(rf"{_IN}rng/(?:[^/]*rank_?(?P<rank>[0-9]+)|[^/]+){_FILE}", "rng"),
    FileName(rf"{_IN}rng(?:_states?)?{_FILE}", "rng"),
    FileName(r"random/.*", "rng"),
    FileName(rf"{_IN}(?:lr_)?scheduler(?:_[0-9]+)?{_FILE}", "scheduler"),
    FileName(r"lr_scheduler/.*", "scheduler"),
    FileName(
        rf"{_IN}(?:train_)?data_?loader/(?:[^/]*rank_?(?P<rank>[0-9]+)|[^/]+){_FILE}", "dataloader"
    ),
    FileName(
        rf"{_IN}(?:train_)?(?:dataloader|dl)[^/]*?(?:rank_?(?P<rank>[0-9]+))?{_FILE}",
        "dataloader",
    ),
    FileName(rf"{_IN}(?:sampler|dl_state_dict)[^/]*{_FILE}", "dataloader"),
    FileName(r"extra_state(?:_rank_(?P<rank>[0-9]+))?\.pt", "rng scheduler dataloader"),
    FileName(r"\.metadata|__[0-9]+\.metadata", weights="DCP metadata"),
    FileName(r"__[0-9]+_[0-9]+\.distcp", weights="a DCP shard"),
    FileName(
        rf"(?P<folder>)(?:[^/]+/)?r?(?P<again_rank>{_N})/iter_[0-9]+_(?P<rank>{_N})_local\.pt",
        "model optimizer scheduler rng step",
        "nvrx",
        "nvrx",
        "state",
    ),
    FileName(r"iter_[0-9]+_[0-9]+_local\.pt", weights="an NVRx local checkpoint"),
    FileName(
        rf"(?P<folder>)(?:[^/]*-)?ba[0-9]+-rank(?P<rank>{_N})\.pt",
        "model optimizer scheduler rng step dataloader",
        "composer-ranks",
        "composer",
        "state",
    ),
    FileName(rf"{_IN}(?!optim)[^/]+\.safetensors", "model", weights="safetensors weights"),
    FileName(r".+\.safetensors(?:\.index\.json)?", weights="safetensors weights"),
    FileName(
        rf"{_IN}(?:[^/]+[-_.])?optimizer(?:[-_.0-9][^/]*)?\.bin",
        "optimizer",
        weights="Hugging Face weights",
    ),
    FileName(
        rf"{_IN}(?:[^/]+[-_.])?(?:pytorch_model|adapter_model|model)(?:[-_.0-9][^/]*)?\.bin",
        "model",
        weights="Hugging Face weights",
    ),
    FileName(
        r".+\.bin\.index\.json|tf_model.*\.h5|flax_model.*\.msgpack",
        weights="Hugging Face weights",
    ),
    FileName(rf"{_IN}consolidated\.[0-9]+\.pth", "model", weights="Llama weights"),
    FileName(
        r"_CHECKPOINT_METADATA|commit_success\.txt|manifest\.ocdbt",
        weights="an Orbax checkpoint",
    ),
    FileName(r".+\.nemo", weights="a NeMo checkpoint"),
    FileName(r".+\.gguf", weights="GGUF weights"),
    FileName(rf"{_IN}optimizer(?:_[0-9]+)?{_FILE}", "optimizer", weights=_TORCH_WEIGHTS),
    FileName(
        rf"{_IN}(?:pytorch_model|model|consolidated)[^/]*{_FILE}", "model", weights=_TORCH_WEIGHTS
    ),
    FileName(
        rf".+\.ckpt|.+\.pth(?:\.tar)?|{_SAYS_WEIGHTS}\.(?:pt|pkl|tar|bin)|[a-z]{{0,2}}[-_]?[0-9]+\.pt",
        weights=_TORCH_WEIGHTS,
    ),
    FileName(
        r".*ckpt.*\.index|saved_model\.pb|variables\.index", weights="a TensorFlow checkpoint"
    ),
    FileName(rf"{_SAYS_WEIGHTS}\.(?:npz|h5|hdf5|keras|msgpack)", weights="saved weights"),
    FileName(
        rf"(?P<folder>)(?!.*{_OTHER_RANK})(?!.*rank.*rank)(?:.*[^a-z])?rank[-_]?(?P<rank>{_N})"
        r"(?![0-9]).*\.(?:pt|pth|pkl|bin|ckpt|safetensors)",
        grid=BY_RANK,
    ),
)

_REPEATED = r"(?:[?*+]|\{[^}]*\})"
_GROUP_OR_SET = rf"(?:\([^()]*\)|\[[^]]*\]){_REPEATED}*"
_NO_TEXT = rf"\0|(?:\\.|.){_REPEATED}+|\\\w|(?<!\\)\."


def full_match(pattern: str, name: str) -> re.Match[str] | None:
    """`re.fullmatch`, without compiling a pattern whose text the name lacks.

    To compile a pattern takes 0.1 ms, and a name that matches none is compared with all.
    """
    return re.fullmatch(pattern, name) if text_in(pattern) in name else None


@cache
def text_in(pattern: str) -> str:
    """The longest text that every match of a pattern of these tables has; empty for none.

    Groups and sets are left out, from the innermost on, and what may be repeated.
    """
    n_left_out = 1
    while n_left_out:
        pattern, n_left_out = re.subn(_GROUP_OR_SET, "\0", pattern)
    texts = [] if "|" in pattern else re.split(_NO_TEXT, pattern)
    return max((text.replace("\\", "") for text in texts), key=len, default="")


_ALWAYS = "+"
AGAIN = "again_"
_SHARDED = frozenset({"model", "optimizer"})


@lru_cache(maxsize=1 << 14)
def matches(path: str, layout: str = "") -> tuple[tuple[FileName, re.Match[str]], ...]:
    """The rows that a path below a step of `layout` matches, the one that decides first."""
    # Every check of an inspection looks up the same names.
    return tuple(_matching(path, layout))


def _matching(path: str, layout: str) -> Iterator[tuple[FileName, re.Match[str]]]:
    for row in FILES:
        match = full_match(row.name, path) if row.layout in ("", layout) else None
        if match:
            yield row, match


def kind_of_file(layout: str, path: str) -> Kind | None:
    """What a file beside the shards holds, by its name in a step of `layout`.

    None for a file that holds no train state, or whose name is not known.
    """
    for row, match in matches(path, layout):
        if row.holds:
            names = tuple(row.holds.replace(_ALWAYS, "").split())
            always = tuple(k[1:] for k in row.holds.split() if k.startswith(_ALWAYS))
            # The ranks of a model hold shards of it, and no copies.
            copies = _SHARDED.isdisjoint(names)
            return Kind(names, match.groupdict().get("rank") if copies else None, always)
    return None


def weights_called(name: str) -> str | None:
    """What saved weights of this name are called; None for a file that is not known as weights."""
    return next((row.weights for row, _ in matches(name) if row.weights), None)


def rank_file(path: str, layout: str = "") -> tuple[FileName, re.Match[str]] | None:
    """The row of a rank file, and where in its name the axes are; None for any other file."""
    without_axes = None
    for row, match in matches(path, layout):
        if row.grid and axes_in(match):
            return row, match
        if row.grid:
            # `rank_3/optim.pt`: the folder of a rank outweighs a name that has no axis here.
            without_axes = without_axes or (row, match)
        elif match.groupdict().get("rank"):
            # State beside the shards that not every rank writes, such as that of a data loader.
            break
    return without_axes


def axes_in(match: re.Match[str]) -> Mapping[str, int]:
    """The numbers that a name states, by axis."""
    axes = match.groupdict()
    no_axis = ("folder", AGAIN)
    return {axis: int(n) for axis, n in axes.items() if n and not axis.startswith(no_axis)}


def rank_in_name(path: str) -> int | None:
    """The rank in the name of a rank file; None for one that names several axes, or none."""
    found = rank_file(path)
    return axes_in(found[1]).get("rank") if found else None


_STATED = "of_"
_APART = "each_"

_LEAST: Mapping[str, int] = {"transformers": 2}
"""Ranks that a numbered name implies: alone, transformers writes `rng_state.pth`."""

_DATA_PARALLEL = ("rank", "dp")
"""Axes that, with the others, count every rank; a grid without one counts model-parallel ranks."""

CONVERSIONS: Mapping[str, str] = {
    "verl": "python -m verl.model_merger merge --backend fsdp --local_dir {step} --target_dir OUT",
    "deepspeed": "ds_to_universal --input_folder {step} --output_folder {step}-universal",
    "nvrx": "ckptctl show {step}",
    "composer": "ckptctl show {step}",
    "verl-megatron": "python -m verl.model_merger merge --backend megatron --local_dir {step} "
    "--target_dir OUT",
    "accelerate-fsdp": "ckptctl show {step}",
    "megatron-legacy": "python tools/checkpoint/convert.py --model-type GPT --loader mcore "
    "--saver mcore --load-dir {root} --save-dir OUT --target-tensor-parallel-size N",
}
"""The frameworks whose files hold shards, which only as many ranks can load, and each one's own
way to another number of ranks; NVRx and Composer have none."""

MAX_NAMED = 8

MAX_STATED = 1_000_000

STATED_INSIDE: Mapping[str, str] = {"dp_world_size": "dp", "mp_world_size": "mp"}
"""Keys of DeepSpeed's model states that state the length of an axis."""


@dataclass(frozen=True, slots=True)
class _Named:
    """One file, by its place in the grid."""

    row: FileName
    match: re.Match[str]
    axes: Mapping[str, int]

    @property
    def of_ranks(self) -> int | None:
        """How many ranks the name states."""
        return next((n for axis, n in self.axes.items() if axis.startswith(_STATED)), None)

    @property
    def what(self) -> str:
        """What the file holds, with its number on each axis that has grids of its own."""
        if self.row.grid == BY_RANK:
            # Every number is left out: the rank's, and one that may change with it, as a node's.
            return f"state in {re.sub('[0-9]+', 'N', self.match.string)}"
        apart = [str(n) for axis, n in self.axes.items() if axis.startswith(_APART)]
        return " ".join((self.row.what, *apart))

    @property
    def grid_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if not axis.startswith((_STATED, _APART)))

    @property
    def place(self) -> tuple[int, ...]:
        return tuple(self.axes[axis] for axis in self.grid_axes)


def grids_of(
    files: Iterable[FileInfo], layout: str = "", stated: Mapping[str, int] | None = None
) -> tuple[Grid, ...]:
    """The grids of rank files among the files of a step of `layout`, each with what it lacks.

    `stated` are the lengths of axes that the content of a file states. All kinds of one
    framework in one folder share the lengths of their axes. Files that state different
    world sizes were written by different attempts, and are apart. Names with a rank that no
    framework writes form a grid where they differ by it. Cost: one match of each
    name; a grid that names claim to be huge is counted, not listed.
    """
    together: dict[tuple[str, str, int | None], list[_Named]] = defaultdict(list)
    for file in files:
        found = rank_file(file.path, layout) if file.kind == "file" else None
        if found is not None:
            row, match = found
            named = _Named(row, match, axes_in(match))
            together[row.grid, match["folder"], named.of_ranks].append(named)
    return tuple(
        grid
        for (framework, _, _), members in sorted(together.items(), key=lambda one: str(one[0]))
        if framework != BY_RANK or len({member.place for member in members}) > 1
        for grid in _grids(framework, members, stated or {})
    )


def _grids(framework: str, members: Sequence[_Named], stated: Mapping[str, int]) -> Iterator[Grid]:
    lengths: dict[str, int] = defaultdict(lambda: _LEAST.get(framework, 1), stated)
    for member in members:
        for axis, n in member.axes.items():
            if axis.startswith(_STATED):
                lengths[axis.removeprefix(_STATED)] = max(n, lengths[axis.removeprefix(_STATED)])
            elif not axis.startswith(_APART):
                lengths[axis] = max(n + 1, lengths[axis])
    kinds: dict[tuple[str, Sequence[str]], list[_Named]] = defaultdict(list)
    for member in members:
        kinds[member.what, member.grid_axes].append(member)
    grids = [_grid(alike, lengths) for alike in kinds.values()]
    # What rank 0 of three and more wrote, and the others did not beside kinds that all wrote.
    is_enough = any(grid.n_present == grid.n_files > 2 for grid in grids)
    yield from (grid for grid in grids if not (is_enough and is_of_rank_0(grid)))


def _grid(alike: Sequence[_Named], lengths: Mapping[str, int]) -> Grid:
    first = min(alike, key=lambda member: member.match.string)
    axes = first.grid_axes
    there = {member.place for member in alike}
    numbers = {_number(place, [lengths[axis] for axis in axes]) for place in there}
    places = product(*(range(lengths[axis]) for axis in axes))
    missing = (place for place in places if place not in there)
    counts_all = any(axis in _DATA_PARALLEL for axis in axes)
    n_files = prod(lengths[axis] for axis in axes)
    return Grid(
        first.row.grid,
        first.what,
        first.match["folder"],
        n_files,
        len(there),
        tuple(_name_at(first, place) for place in islice(missing, MAX_NAMED)),
        n_files if counts_all else None,
        first.of_ranks is not None,
        first.row.grid in CONVERSIONS,
        frozenset(numbers) if counts_all else frozenset(),
    )


def is_of_rank_0(grid: Grid) -> bool:
    """Whether rank 0 alone has a file of a kind whose names no framework writes."""
    return grid.framework == BY_RANK and grid.ranks == {0} and grid.n_files > 1


def _number(place: Sequence[int], lengths: Sequence[int]) -> int:
    """The rank at a place of the grid: the last axis varies fastest."""
    number = 0
    for n, length in zip(place, lengths, strict=True):
        number = number * length + n
    return number


def _name_at(member: _Named, place: Sequence[int]) -> str:
    """The path of the file at another place of the grid, from that of one that exists."""
    text, match = member.match.string, member.match
    numbers = dict(zip(member.grid_axes, place, strict=True))
    groups = [group for group in match.groupdict() if group.removeprefix(AGAIN) in numbers]
    for group in sorted(groups, key=match.start, reverse=True):
        start, end = match.span(group)
        number = str(numbers[group.removeprefix(AGAIN)])
        text = text[:start] + number.zfill(_width(match[group])) + text[end:]
    return text


def _width(digits: str) -> int:
    # Names are padded with zeros where a framework pads them: `mp_rank_00`, `rank_0`.
    return len(digits) if digits.startswith("0") else 1
