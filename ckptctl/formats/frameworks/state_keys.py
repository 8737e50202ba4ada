"""The kind of train state of an entry, by its name.

Answers by names and shapes alone: the keys that the frameworks use, and for the
rest a few marks that no model parameter bears. Values are read elsewhere.

Source: the state dicts of torchtitan, KempnerForge, Megatron-LM and -Bridge,
OLMo-core, Composer, Lightning, DeepSpeed, transformers, accelerate, nanotron,
ByteCheckpoint and verl; torch's `get_state_dict`; torchdata's
`StatefulDataLoader`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ckptctl.data_classes import dataclass
from ckptctl.model import Metadata, TensorEntry

Path = Sequence[str | int]

# Words in front of everything else that do not determine the kind.
_WRAPPERS = frozenset(
    {
        "app",
        "app_state",
        "state",
        "train_state",
        "trainer",
        "checkpoint",
        "ckpt",
        "progress",
        "metas",
        "timestamp",
    }
)

_OPTIMIZER_HEAD = (
    r"(?:raw_)?(?:optim|optimizer|optimizers|opt|optimizer_states?|optim_state)(?:_[0-9]+)?"
    r"|chained_[0-9]+|optimizer_state_dict"
)
_OPTIMIZER_MOMENTS = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_avg_slow",
        "exp_avg_res_row",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "exp_inf",
        "prev",
    }
)
_ADAM_SETTINGS = frozenset({"betas", "amsgrad"})
_RNG_HEAD = (
    r"(?:rngs?|rng_tracker_states?|random_states?|(?:.*_)?rng_states?|.*_rng)"
    r"(?:_(?:dp_|global_)?rank)?_?[0-9]*"
)
_SCHEDULER_HEAD = (
    r"(?:lr_|learning_rate_)?(?:scheduler|schedulers|sched)(?:_[0-9]+)?"
    r"|opt_param_scheduler|lr_schedule|scheduler_state_dict"
)
_DATALOADER_HEAD = (
    r"(?:train_|training_)?(?:dataloader|data_loader|loader|dataset|data_iterator|data_iter)"
    r"(?:_state|_state_dict|s)?(?:_(?:dp_)?rank)?_?[0-9]*"
    r"|dl_state(?:_dict)?|sampler|data_state|data_stages"
)
_DATALOADER_MARKS = frozenset(
    {
        "_sampler_iter_state",
        "_sampler_iter_yielded",
        "_num_yielded",
        "_iterator_finished",
        "_snapshot",
        "fetcher_state",
        "_num_batches_fetched",
    }
)
_SCHEDULER_LEAVES = frozenset({"last_epoch", "_last_lr"})
_STEP_LEAVES = frozenset(
    {
        "step",
        "global_step",
        "global_steps",
        "iteration",
        "iter",
        "iter_num",
        "step_count",
        "steps_run",
        "last_train_step",
        "batch",
        "training_step",
        "current_step",
    }
)
_TOKEN_LEAVES = frozenset(
    {
        "tokens",
        "tokens_seen",
        "ntokens_seen",
        "n_tokens_seen",
        "num_tokens",
        "total_tokens",
        "total_tokens_seen",
        "consumed_tokens",
        "consumed_tokens_total",
        "consumed_train_samples",
        "global_train_tokens_seen",
        "num_input_tokens_seen",
        "token",
        "samples_seen",
    }
)
_MODEL_HEAD = (
    r"models?(?:_[0-9]+|_state|_state_dict)?|module|state_dict|weights|ema(?:_model)?|actor|critic"
    r"|pytorch_model(?:_fsdp)?_[0-9]+"
)
_OF_THE_TRAINER = frozenset({"callbacks", "loops"})
"""Keys under which Lightning keeps what belongs to none of the kinds."""
_RANK = r"(?:.*_)?(?:dp_?|global_|local_)?(?:rank|r)_?(?P<rank>[0-9]{1,7})"

CPU_RNG_BYTES = 5056
"""Size of torch's CPU generator state, a 1-d uint8 tensor (`torch.get_rng_state`)."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """What one entry or file is: a kind of train state (`other` for none), and whose.

    `rank` distinguishes the copies of state that exists once per rank; it is None
    for state that exists once. `names` is more than one for a file that holds
    several kinds, of which `always` are in it whatever its keys are.
    """

    names: tuple[str, ...]
    rank: str | None = None
    always: tuple[str, ...] = ()


def kind_of_entry(path: Path, tensor: TensorEntry | None = None) -> StateKind:
    """The kind of one entry of a state dict, by its key path before flattening.

    `tensor` is the entry where it is a tensor. Cost: a few set look-ups.
    """
    words = _unwrapped(_words(path))
    head, leaf = words[0], words[-1]
    if _is_optimizer(words):
        return StateKind(("optimizer",))
    if re.fullmatch(_MODEL_HEAD, head) or _holds_weights(tensor):
        return StateKind(("model",))
    if any(re.fullmatch(_RNG_HEAD, word) for word in words[:2]):
        return StateKind(("rng",), _rank_in(words))
    if re.fullmatch(_SCHEDULER_HEAD, head):
        return StateKind(("scheduler",))
    if re.fullmatch(_DATALOADER_HEAD, head) or not _DATALOADER_MARKS.isdisjoint(words):
        return StateKind(("dataloader",), _rank_in(words))
    if head in _OF_THE_TRAINER:
        return StateKind(("other",))
    if tensor is not None and tensor.dtype == "uint8" and tensor.shape == (CPU_RNG_BYTES,):
        return StateKind(("rng",), _rank_in(words))
    if tensor is None or tensor.shape == ():
        return _kind_of_number(leaf, len(words), is_tensor=tensor is not None)
    return StateKind(("model",))


def _holds_weights(tensor: TensorEntry | None) -> bool:
    return tensor is not None and tensor.shape != () and "float" in tensor.dtype


def _words(path: Path) -> list[str]:
    return ".".join(map(str, path)).lower().replace("/", ".").split(".")


def _unwrapped(words: list[str]) -> list[str]:
    first = next((i for i, word in enumerate(words) if word not in _WRAPPERS), len(words) - 1)
    # A bare optimizer state dict begins with `state` itself.
    bare_state = first > 0 and words[first - 1] == "state" and words[-1] in _OPTIMIZER_MOMENTS
    return words[first - 1 :] if bare_state else words[first:]


def _is_optimizer(words: Sequence[str]) -> bool:
    if re.fullmatch(_OPTIMIZER_HEAD, words[0]) or "param_groups" in words:
        return True
    return "state" in words[:-1] and words[-1] in _OPTIMIZER_MOMENTS


def _kind_of_number(leaf: str, depth: int, *, is_tensor: bool) -> StateKind:
    if depth <= 3 and leaf in _STEP_LEAVES:
        return StateKind(("step",))
    if depth <= 3 and leaf in _TOKEN_LEAVES:
        return StateKind(("tokens",))
    if leaf in _SCHEDULER_LEAVES:
        return StateKind(("scheduler",))
    return StateKind(("model",) if is_tensor else ("other",))


def _rank_in(words: Sequence[str]) -> str | None:
    for at, word in enumerate(words):
        if word.startswith("shard_"):
            # Megatron's ShardedObject: `shard_{offsets}_{shape}`, dots inside both.
            return ".".join(words[at:])
        match = re.fullmatch(_RANK, word)
        if match:
            return match["rank"]
        if word.isdigit() and words[0].startswith(("rng", "random")):
            return word
    return None


def entry_kinds(metadata: Metadata, part_path: str = "") -> Mapping[str, StateKind]:
    """The kind of every entry of a metadata, by FQN. Cost: one comparison per name.

    The folder of the part counts too: `optimizer_0/` holds the optimizer, and with it
    sometimes the scheduler.
    """
    folder = part_path.rsplit("/", maxsplit=1)[-1]
    is_optimizer = re.fullmatch(_OPTIMIZER_HEAD, folder) is not None
    front = (folder,) if is_optimizer or re.fullmatch(_MODEL_HEAD, folder) else ()
    kinds = {
        fqn: kind_of_entry((*front, *(entry.path or (fqn,))), entry)
        for fqn, entry in metadata.tensors.items()
    }
    for fqn, bytes_entry in metadata.bytes_entries.items():
        path = bytes_entry.path or (fqn,)
        own = kind_of_entry(path) if is_optimizer else None
        is_guest = own is not None and own.names == ("scheduler",)
        kinds[fqn] = own if own and is_guest else kind_of_entry((*front, *path))
    return kinds


def is_wrapper(key: str) -> bool:
    """Whether a key does not determine what is below it, so that the entries there decide."""
    return key.lower() in _WRAPPERS


def optimizer_is_hollow(paths: Iterable[Path]) -> bool:
    """The optimizer's entries are settings of an Adam without any moments.

    A plain `optimizer.state_dict()` of a fresh Adam has this form: a resume
    from it starts the moments at zero.
    """
    leaves: set[str] = set()
    settings: set[str] = set()
    for path in paths:
        words = [word for part in path for word in str(part).split(".")]
        (settings if "param_groups" in words else leaves).add(words[-1])
    return bool(settings & _ADAM_SETTINGS) and not leaves & _OPTIMIZER_MOMENTS


def is_optimizer_step(path: Path) -> bool:
    """Whether the entry is the `step` count that an optimizer keeps per parameter."""
    words = _unwrapped(_words(path))
    return words[-1] == "step" and "state" in words[:-1] and _is_optimizer(words)


def is_count_of_one_rank(fqn: str) -> bool:
    """Whether a count of tokens is that of one data-parallel rank, and not of the run.

    Source: torchtitan 0.3 `trainer.py` (`ntokens_seen`), which sums it over ranks only to log it;
    it saves the place in the data of each data-parallel rank.
    """
    return fqn.rpartition(".")[2] == "ntokens_seen"


def is_moment(path: Path) -> bool:
    """Whether the entry is one of the averages that an optimizer keeps of the gradients."""
    words = _unwrapped(_words(path))
    return _is_optimizer(words) and not _OPTIMIZER_MOMENTS.isdisjoint(words)


def optimizer_of(path: Path) -> str:
    """Which optimizer an optimizer's entry belongs to: its key path up to `state`."""
    words = [str(part) for part in path]
    return ".".join(words[: words.index("state")]) if "state" in words else ".".join(words[:1])
