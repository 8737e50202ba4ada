"""The names of the files that hold train state: what each holds, and whose rank it is of.

One table. A row states what a file of that name holds, and which axes of a grid of ranks the
name states. The first row that matches decides. Nothing is read here.

`grids` reads which ranks the names of a step state.

Source: verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`; DeepSpeed 0.19.8
`runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`) and
`runtime/pipe/module.py`; Megatron-LM `training/checkpointing.py` (`get_checkpoint_name`);
transformers 5.23 `trainer.py` (`_save_rng_state`); accelerate 1.15 `checkpointing.py`; the
sidecars of torchtitan, KempnerForge, OLMo-core, Lightning, nanotron, ByteCheckpoint, NeMo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from ckptctl.formats.frameworks.state_keys import StateKind
from ckptctl.model import FileInfo
from ckptctl.outside_numbers import clamped


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
    """What each file of the grid holds, for messages."""


_N = "[0-9]{1,6}"
_IN = r"(?P<folder>(?:.*/)?)"
_FILE = r"\.(?:pt|pth|pkl|bin)"
_FILE_OR_CKPT = r"\.(?:pt|pth|pkl|bin|ckpt|tar)"
_ONE_OF = r"(?:.*[-_.])?"
_AND = rf"(?:[-_.0-9].*)?{_FILE_OR_CKPT}"
_COUNTED = "step scheduler tokens +dataloader"

_VERL = rf"_world_size_(?P<of_rank>{_N})_rank_(?P<rank>{_N})\.pt"
_MP = rf"mp_rank_(?P<mp>{_N})"
# Its folders are places in the grid, so that the folder in front is the shortest that matches.
_ABOVE = r"(?P<folder>(?:.*?/)??)"
_MP_FOLDER = rf"mp_rank_(?P<tp>{_N})(?:_(?P<pp>{_N}))?(?:_(?P<ep>{_N}))?/"
_MEGATRON = rf"{_ABOVE}(?:{_MP_FOLDER})?"
_NANOTRON = (
    rf"_pp-(?P<pp>{_N})-of-(?P<of_pp>{_N})(?:_dp-(?P<dp>{_N})-of-(?P<of_dp>{_N}))?"
    rf"_tp-(?P<tp>{_N})-of-(?P<of_tp>{_N})_exp-(?P<exp>{_N})-of-(?P<of_exp>{_N})\.pt"
)
# verl wrote Megatron's state this way until 0.4. Of the optimizer, one rank of each
# model-parallel one writes.
_PP_TP = rf"pp(?P<pp>{_N})_tp(?P<tp>{_N})"
_UNIVERSAL = "deepspeed-universal"
_SAYS_WEIGHTS = (
    r"(?:.*[-_.])?(?:ckpt|checkpoint|snapshot|last|latest|best|final|model|optimizer|optim|weights"
    r"|state|state_dict|params|ema|rank|epoch[-_]?[0-9]+|step[-_]?[0-9]+)(?:[-_.0-9].*)?"
)

OF_DATA = (
    "tokenizer|vocab|config|args|data|dataset|cache|latents?|samples?|metrics|losses|predictions?"
    "|preds|results?|embeddings?|logits|grads?|gradients|activations?|features?|outputs?|stats"
    "|history"
)
"""Words in the names of files of `torch.save` that are no weights."""

_NO_DATA = (
    rf"(?!(?:.*[-_.])?(?:{OF_DATA}|train|valid|val|test|split|batch(?:es)?|chunk|corpus|tokens?|ids"
    r"|labels?|targets?|inputs?|graphs?|mean|std|norm|processed)(?:[-_.0-9]|$))"
)

FILES = (
    FileName(rf"{_IN}model{_VERL}", "+model +step", grid="verl", what="model"),
    FileName(rf"{_IN}optim{_VERL}", "optimizer", grid="verl", what="optimizer"),
    FileName(rf"{_IN}extra_state{_VERL}", "rng scheduler", grid="verl", what="extra state"),
    FileName(rf"{_IN}data_(?P<rank>{_N})\.pt", "dataloader", "verl", "verl data", "dataloader"),
    FileName(rf"{_IN}data\.pt", "dataloader", "verl"),
    FileName(
        rf"{_IN}(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>{_N})_{_MP}_?optim_states\.pt",
        "optimizer",
        grid="deepspeed",
        what="optimizer",
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
    ),
    FileName(
        rf"{_IN}{_MP}_model_states\.pt",
        "model step scheduler",
        grid="deepspeed",
        what="model",
    ),
    FileName(
        rf"{_IN}layer_(?P<each_layer>{_N})-model_(?P<tp>{_N})-model_states\.pt",
        "model",
        grid="deepspeed layers",
        what="layer",
    ),
    FileName(
        rf"{_IN}(?:layer_(?P<each_layer>{_N})_)?expert_(?P<expert>{_N})_{_MP}_model_states\.pt",
        "model",
        grid="deepspeed experts",
        what="experts",
    ),
    FileName(
        rf"{_IN}expp_rank_(?P<ep>{_N})_{_MP}_optim_states\.pt",
        "optimizer",
        grid="deepspeed experts",
        what="optimizer of the experts",
    ),
    FileName(
        rf"{_MEGATRON}model_optim_rng\.pt",
        "model optimizer rng scheduler step +dataloader",
        grid="megatron-legacy",
        what="model",
    ),
    FileName(
        rf"{_MEGATRON}model_rng\.pt",
        "model rng scheduler step +dataloader",
        grid="megatron-legacy",
        what="model",
    ),
    # DLRover's flash checkpoints: each rank saves its shard of Megatron's distributed optimizer.
    FileName(
        rf"{_ABOVE}rank_(?P<rank>{_N})/distrib_optim\.pt",
        "optimizer",
        grid="dlrover",
        what="optimizer",
    ),
    FileName(
        rf"{_MEGATRON}(?:distrib_)?optim\.pt",
        "optimizer",
        grid="megatron-legacy",
        what="optimizer",
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
    FileName(r"checkpoint_metadata\.json", "step tokens +dataloader", "nanotron"),
    FileName(
        rf"(?P<folder>)random/(?P<again_rank>tp-(?P<tp>{_N})-of-(?P<of_tp>{_N})"
        rf"_dp-(?P<dp>{_N})-of-(?P<of_dp>{_N})_pp-(?P<pp>{_N})-of-(?P<of_pp>{_N}))\.pt",
        "rng",
        "nanotron",
        "nanotron",
        "RNG states",
    ),
    FileName(r"random/(?P<again_rank>[^/]+)\.pt", "rng", "nanotron"),
    FileName(
        rf"(?P<folder>)optimizer/optimizer{_NANOTRON}",
        "optimizer",
        "nanotron",
        "nanotron",
        "optimizer",
    ),
    FileName(
        rf"(?P<folder>)lr_scheduler/lr_scheduler{_NANOTRON}",
        "scheduler",
        "nanotron",
        "nanotron",
        "scheduler",
    ),
    # Of a stage, all tensor-parallel ranks write a slice of each tensor that they split.
    FileName(
        rf"(?P<folder>model/.*_)pp-rank-(?P<each_pp>{_N})-of-{_N}"
        rf"_tp-rank-(?P<tp>{_N})-of-(?P<of_tp>{_N})"
        rf"(?:_exp-rank-(?P<exp>{_N})-of-(?P<of_exp>{_N}))?\.safetensors",
        "model",
        "nanotron",
        "nanotron",
        "slices",
    ),
    FileName(r"step_scheduler\.pt", "step", "automodel"),
    FileName(r"training_state\.pt", "optimizer scheduler step"),
    FileName(r"trainer_state\.json", "step +dataloader"),
    FileName(r"train_state\.json", "step", "kohya"),
    FileName(rf"{_IN}(?:random_states?|rng_states?)_(?P<rank>[0-9]+){_FILE}", "rng"),
    FileName(rf"{_IN}rng/(?:[^/]*rank_?(?P<rank>[0-9]+)|[^/]+){_FILE}", "rng"),
    FileName(rf"{_IN}rng(?:_states?)?{_FILE}", "rng"),
    FileName(r"random/.*", "rng"),
    FileName(rf"{_IN}(?:lr_)?scheduler(?:_[0-9]+)?{_FILE}", "scheduler"),
    FileName(r"lr_scheduler/.*", "scheduler"),
    FileName(
        rf"{_IN}(?:train_)?data_?(?:loader|reader)/(?:[^/]*(?:rank|dp)_?(?P<rank>[0-9]+)|[^/]+)"
        rf"{_FILE}",
        "dataloader",
    ),
    FileName(
        rf"{_IN}(?:train_)?(?:dataloader|dl)[^/]*?(?:rank_?(?P<rank>[0-9]+))?{_FILE}", "dataloader"
    ),
    FileName(rf"{_IN}(?:sampler|dl_state_dict)[^/]*{_FILE}", "dataloader"),
    FileName(r"extra_state(?:_rank_(?P<rank>[0-9]+))?\.pt", "rng scheduler dataloader"),
    FileName(
        rf"(?P<folder>)(?:[^/]+/)?r?(?P<again_rank>{_N})/iter_[0-9]+_(?P<rank>{_N})_local\.pt",
        "model optimizer scheduler rng step",
        "nvrx",
        "nvrx",
        "state",
    ),
    FileName(
        rf"(?P<folder>)(?:[^/]*-)?ba[0-9]+-rank(?P<rank>{_N})\.pt",
        "model optimizer scheduler rng step dataloader",
        "composer-ranks",
        "composer",
        "state",
    ),
    FileName(
        rf"(?P<folder>)checkpoint_[0-9_]+(?:-model_part-(?P<mp>{_N}))?-shard(?P<rank>{_N})\.pt",
        "model optimizer scheduler step dataloader",
        "fairseq-shards",
        "fairseq-shards",
        "state",
    ),
    FileName(r"meta_[0-9]+\.json", "step dataloader", "by-kind"),
    FileName(rf"{_ONE_OF}(?:optimizer|optim|opt){_AND}", "optimizer", "by-kind"),
    FileName(rf"{_ONE_OF}(?:scheduler|sched){_AND}", "scheduler", "by-kind"),
    FileName(rf"(?!{_ONE_OF}scaler{_AND}).+{_FILE_OR_CKPT}", "+model optimizer step", "by-kind"),
    FileName(r"do_[0-9]{8}", "+optimizer step", "by-kind"),
    FileName(r"g_[0-9]{8}", "model", "by-kind"),
    FileName(r"models/net_[a-z]+_[0-9]+\.pth", "model", "basicsr"),
    FileName(r"training_states/[0-9]+\.state", "optimizer scheduler step", "basicsr"),
    FileName(r"training_state/(?:[^/]+/)?optimizer_state\.safetensors", "optimizer", "lerobot"),
    FileName(r"training_state/rng_state\.safetensors", "rng", "lerobot"),
    FileName(r"training_state/scheduler_state\.json", "scheduler", "lerobot"),
    FileName(r"training_state/training_step\.json", "step", "lerobot"),
    FileName(rf"{_IN}lit_model\.pth", "model optimizer step"),
    # OLMo's `local` checkpointer.
    FileName(rf"{_ABOVE}model/rank(?P<rank>{_N})\.pt", "model", "olmo-core", "olmo", "model"),
    FileName(
        rf"{_ABOVE}optim/rank(?P<rank>{_N})\.pt", "optimizer", "olmo-core", "olmo", "optimizer"
    ),
    FileName(rf"{_IN}(?!optim)[^/]+\.safetensors", "model"),
    FileName(
        rf"{_IN}(?:[^/]+[-_.])?optimizer(?:[-_.0-9][^/]*)?\.bin",
        "optimizer",
    ),
    FileName(
        rf"{_IN}(?:[^/]+[-_.])?(?:pytorch_model|adapter_model|model)(?:[-_.0-9][^/]*)?\.bin",
        "model",
    ),
    FileName(rf"{_IN}consolidated\.[0-9]+\.pth", "model"),
    FileName(rf"{_IN}optimizer(?:_[0-9]+)?{_FILE}", "optimizer"),
    FileName(rf"{_IN}(?:pytorch_model|model|consolidated)[^/]*{_FILE}", "model"),
    FileName(rf"(?:.*/)?model/.+{_FILE}", "model"),
    FileName(rf"(?:.*/)?optim(?:izer)?/.+{_FILE}", "optimizer"),
)

_REPEATED = r"(?:[?*+]|\{[^}]*\})"
_GROUP_OR_SET = rf"(?:\([^()]*\)|\[[^]]*\]){_REPEATED}*"
_NO_TEXT = rf"\0|(?:\\.|.){_REPEATED}+|\\\w|(?<!\\)\."


def full_match(pattern: str, name: str) -> re.Match[str] | None:
    """`re.fullmatch`, without compiling a pattern whose text the name lacks.

    To compile a pattern takes 0.1 ms, and a name that matches none is compared with all.
    """
    return _compiled(pattern).fullmatch(name) if text_in(pattern) in name else None


_compiled = cache(re.compile)


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
    names = ("", re.sub("-(?:epochs|samples)$", "", layout))
    for row in FILES:
        match = full_match(row.name, path) if row.layout in names else None
        if match:
            yield row, match


def kind_of_file(layout: str, path: str) -> StateKind | None:
    """What a file beside the shards holds, by its name in a step of `layout`.

    None for a file that holds no train state, or whose name is not known.
    """
    for row, match in matches(path, layout):
        if row.holds:
            names = tuple(row.holds.replace(_ALWAYS, "").split())
            always = tuple(k[1:] for k in row.holds.split() if k.startswith(_ALWAYS))
            # The ranks of a model hold shards of it, and no copies.
            groups = match.groupdict() if _SHARDED.isdisjoint(names) else {}
            rank = groups.get("rank") or groups.get(f"{AGAIN}rank")
            of_framework = bool(row.layout or row.grid)
            return StateKind(names, rank, always, of_framework=of_framework)
    return None


_WEIGHTS = (
    r".+\.(?:ckpt|pth|pth\.tar|safetensors|distcp|nemo|gguf)|_CHECKPOINT_METADATA|\.metadata|__[0-9]+\.metadata"
    rf"|{_SAYS_WEIGHTS}\.(?:pt|pkl|tar|bin)|{_NO_DATA}.+\.pt"
    rf"|{_NO_DATA}(?:.*[-_.])?(?:(?:global_)?step|iter|epoch|ckpt|checkpoint|snapshot)[-_=]?[0-9]+"
    r"\.(?:tar\.[a-z0-9]+|t[gbx]z2?|tzst|zip|7z|sqfs|squashfs)"
)


def is_named_as_weights(name: str) -> bool:
    """Whether a file is named as saved weights or packed ones: a hint, which no answer needs."""
    kind = kind_of_file("", name)
    is_of_model = kind is not None and not {"model", "optimizer"}.isdisjoint(kind.names)
    return is_of_model or full_match(_WEIGHTS, name) is not None


MAX_TEXT_BYTES = 64 << 10
"""A text of a known name is a configuration or a note up to this size, and unknown beyond."""

_LOGS_AND_SOURCE = (
    r"(?i:.*\.(?:log|out|err)(?:\.[0-9]{1,3})?|.*\.(?:jsonl|ndjson|csv|tsv|wandb)|.*tfevents.*"
    r"|.*\.(?:py|pyc|pyi|ipynb|sh|bash|slurm|sbatch|cc?|cpp|cuh?|hpp?|js|ts|go|rs|java|css)"
    r"|.*\.(?:png|jpe?g|gif|bmp|webp|svg|pdf|mp[34]|wav|flac|ogg))"
    r"|(?:tokenizer|vocab)\.json|merges\.txt|tokenizer\.model|\.DS_Store"
)
_TEXT = (
    r"(?i:.*\.(?:md|rst|txt|json|ya?ml|toml|cfg|conf|ini|env|xml|html?|tex|lock|pid|diff|patch"
    r"|[oe][0-9]{5,9})|(?:readme|licen[sc]e|notice|authors|makefile|dockerfile|commit|version)"
    r"|\.(?:git|docker)?(?:ignore|attributes|keep|modules|editorconfig))"
)


def is_known_as_no_save(file: FileInfo) -> bool:
    """Whether a file or link is known not to be a save: a log, source, a picture, a small text.

    By its name and size; anything else is unknown, whatever it is called.
    """
    name = file.path.rpartition("/")[2]
    if file.kind == "file" and not file.size:
        return True
    if full_match(_LOGS_AND_SOURCE, name) is not None:
        return True
    return file.size <= MAX_TEXT_BYTES and full_match(_TEXT, name) is not None


def may_hold_state(path: str) -> bool:
    """Whether a rank may save state under such a name; false for text, pictures and source.

    By the same names as `is_known_as_no_save`, but for two differences. Text counts as no state
    whatever its size: the step that it is in shows what a save consists of. JSON may hold state:
    some trainers keep the step or the place in the data of each rank in it.
    """
    name = path.rpartition("/")[2]
    if full_match(_LOGS_AND_SOURCE, name) is not None:
        return False
    return name.endswith(".json") or full_match(_TEXT, name) is None


def says_weights(path: str) -> bool:
    """Whether a file of `torch.save` is named as one that holds state: `checkpoint.pt`."""
    return bool(full_match(rf"{_IN}{_SAYS_WEIGHTS}\.(?:pt|pth|pkl|bin|ckpt|tar)", path))


def rank_file(path: str, layout: str = "") -> tuple[FileName, re.Match[str]] | None:
    """The row of a rank file, and where in its name the axes are; None for any other file."""
    without_axes = None
    for row, match in matches(path, layout):
        if row.grid and axes_in(match):
            return row, match
        if row.grid and not any(map(str.isdecimal, match["folder"])):
            # `rank_3/optim.pt` is in the folder of a rank, which this row does not know.
            without_axes = without_axes or (row, match)
        elif match.groupdict().get("rank"):
            # State beside the shards that not every rank writes, such as that of a data loader.
            break
    return without_axes


def axes_in(match: re.Match[str]) -> Mapping[str, int]:
    """The numbers that a name states, by axis."""
    axes = match.groupdict()
    no_axis = ("folder", AGAIN)
    return {axis: clamped(n) for axis, n in axes.items() if n and not axis.startswith(no_axis)}


_RANK = re.compile(r"(?:^|[^a-z])rank[-_]?([0-9]{1,6})(?![0-9])")


def rank_in_name(path: str) -> int | None:
    """The rank in the name of a rank file; None for one that names several axes, or none."""
    found = rank_file(path)
    if found is not None:
        return axes_in(found[1]).get("rank")
    ranks = _RANK.findall(path)
    return clamped(ranks[0]) if len(ranks) == 1 else None
