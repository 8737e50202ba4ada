"""Decide which kind of train state each entry of a saved state is.

The one place that decides: `show`, `pick`, `--require`, the checks and resharding all ask
`kinds_of`, for the entries of DCP metadata (`entry_kinds`), of files of `torch.save` and JSON
(`leaves_of`) and of the headers of safetensors. In this order:

1. what a person maps (`--state KIND=KEY`);
2. content: averages of gradients beside parameters, groups of parameters, states of
   generators, counters of schedulers and data loaders, weights;
3. key paths: whole words at fixed places of the path, never a part of a word.

`file_names` adds what the name of a file states, where neither decides. What nothing decides is
not recognized: it may hold state, see `StateKind.may_be`.

Source: torch 2.13 `torch/optim/` (the state of each class), `torch/optim/lr_scheduler.py`,
`torch/amp/grad_scaler.py`, `torch/distributed/checkpoint/state_dict.py` (`get_state_dict`);
torchdata 0.11 `StatefulDataLoader`; CPython 3.13 `random.getstate`; numpy 2.4
`RandomState.get_state`; optax 0.2 `transform.py` (`mu`, `nu`); the state dicts of torchtitan,
KempnerForge, Megatron-LM and -Bridge, OLMo-core, Composer, Lightning, DeepSpeed, transformers,
accelerate, nanotron, ByteCheckpoint, verl, LitGPT, fairseq and metaseq.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from ckptctl.formats.frameworks.layout_tables import TABLES
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.values import ShardStub, TensorStub
from ckptctl.model import Metadata

Path = Sequence[str | int]
Words = tuple[str, ...]
_NOTHING: Mapping[Words, tuple[int, ...] | None] = {}
StateMap = Sequence[tuple[str, str]]
"""Pairs of a kind and a whole key path or file name: what `--state KIND=KEY` gives."""


_WORDS = TABLES.words


def is_moment_name(fqn: str) -> bool:
    """Whether a tensor is what an optimizer keeps of the gradients, by the end of its name."""
    return fqn.rpartition(".")[2] in _WORDS.moments


def is_square(fqn: str) -> bool:
    """Whether a tensor is one that an optimizer never lets fall below zero."""
    return fqn.rpartition(".")[2] in _WORDS.squares


def has_shape_of_parameter(fqn: str) -> bool:
    """Whether a moment has a value for each value of its parameter."""
    return fqn.rpartition(".")[2] in _WORDS.moments - _WORDS.other_shapes


SCALER_MARKS = _WORDS.scaler_marks
"""What the state of a gradient scaler has, whatever it is called."""
_MOST_IN_A_SCALER = 6
"""Source: torch 2.13 `GradScaler.state_dict`: five values."""


def is_scaler_name(word: str) -> bool:
    """Whether a key is that of a gradient scaler, which is state of none of the kinds."""
    return _matches(_WORDS.scaler_head, word)


CPU_RNG_BYTES = 5056
"""Size of torch's CPU generator state, a 1-d uint8 tensor (`torch.get_rng_state`)."""
CUDA_RNG_BYTES = 16
"""Size of that of a CUDA device: seed and offset, as common as any short tensor."""
_MT_WORDS = 624

_HEADS = (
    (2, _WORDS.rng_head, "rng"),
    (3, _WORDS.scheduler_head, "scheduler"),
    (1, _WORDS.dataloader_head, "dataloader"),
)
"""Among how many first words of a path, the pattern of one, and the kind that it states."""

_MAX_STEP_DEPTH = 3
_SCALARS_ONLY = ("step", "tokens", "dataloader")
_NO_TENSORS = ("scheduler", "rng", "dataloader", "step", "tokens")
_ANYTHING = ("optimizer", *_NO_TENSORS)


@dataclass(frozen=True, slots=True)
class StateKind:
    """What one entry or file is: a kind of train state (`other` for none), and whose.

    `rank` distinguishes the copies of state that exists once per rank; it is None
    for state that exists once. `names` is more than one for a file that holds
    several kinds, of which `always` are in it whatever its keys are. `may_be` are the kinds
    that an entry may be that is not recognized; empty for all others.
    """

    names: tuple[str, ...]
    rank: str | None = None
    always: tuple[str, ...] = ()
    may_be: tuple[str, ...] = ()
    of_framework: bool = False
    """A framework alone names files so: bare tensors in one are what the name states."""


_MODEL = StateKind(("model",))
_COPY = StateKind(("model",), may_be=("optimizer",))
_OPTIMIZER = StateKind(("optimizer",))
_SCHEDULER = StateKind(("scheduler",))
_OTHER = StateKind(("other",))
_LOADER_ITSELF = StateKind(("other",), may_be=("dataloader",))


class Leaf(NamedTuple):
    """One entry of a saved state: its key path, and what is known of its content.

    `shape` is None for what is no tensor. `content` of the others is `rng` (the state of a
    generator), `count` (an integer, in `value`), `plain` (text, a flag, a fraction, or a list
    of them), `settings` (a list of numbers), `loader` (torch's `DataLoader` itself) or `unread`.
    """

    path: Path
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    content: str = ""
    value: int | None = None
    local: tuple[int, ...] | None = None
    """Of a tensor that ranks cut: the shape of the part that the file holds."""

    @property
    def is_weight(self) -> bool:
        """A tensor that may be a parameter: of one dimension or more, and of fractions."""
        return bool(self.shape) and ("float" in self.dtype or "complex" in self.dtype)


_LOADER = "torch.utils.data.dataloader.DataLoader"
"""Its pickle holds the data set and settings; the place only if the sampler keeps one.

Source: torch 2.14 `torch/utils/data/dataloader.py`; Lightning Fabric 2.6 saves what has no
`state_dict` as it is, and LitGPT 0.5 its loader among it.
"""


def leaves_of(value: object, path: Path = ()) -> Iterator[Leaf]:
    """The entries of a decoded file, each with the keys that lead to it; no empty containers.

    Cost: one visit of each value.
    """
    if isinstance(value, ShardStub):
        yield Leaf(path, value.local.dtype, value.shape, local=value.local.shape)
        return
    if isinstance(value, TensorStub):
        yield Leaf(path, value.dtype, value.shape)
        return
    if isinstance(value, Opaque) and value.name == _LOADER:
        yield Leaf(path, content="loader")
        return
    held = value.state if isinstance(value, Opaque) and value.state else value
    if isinstance(held, Mapping):
        for key, item in held.items():
            yield from leaves_of(item, (*path, key if isinstance(key, int) else str(key)))
    elif _is_generator(held):
        yield Leaf(path, content="rng")
    elif isinstance(held, (list, tuple)):
        if any(isinstance(item, (Mapping, list, tuple, TensorStub, Opaque)) for item in held):
            for number, item in enumerate(held):
                yield from leaves_of(item, (*path, number))
        elif held:
            is_numbers = any(type(item) is int for item in held)
            yield Leaf(path, content="settings" if is_numbers else "plain")
    elif type(held) is int:
        yield Leaf(path, content="count", value=held)
    elif isinstance(held, (Opaque, bytes)):
        yield Leaf(path, content="unread")
    elif held is not None and held != "":
        yield Leaf(path, content="plain")


def _is_generator(value: object) -> bool:
    """Whether a value is the state of a Mersenne twister, of Python or of numpy."""
    match value:
        case [3, [*numbers], _] | (3, (*numbers,), _):
            return len(numbers) == _MT_WORDS + 1
        case ["MT19937", *_] | ("MT19937", *_):
            return True
    return False


def entries_of(metadata: Metadata) -> Iterator[tuple[str, Leaf]]:
    """The entries of a metadata, by FQN."""
    for fqn, entry in metadata.tensors.items():
        yield fqn, Leaf(entry.path or (fqn,), entry.dtype, entry.shape)
    for fqn, held in metadata.bytes_entries.items():
        yield fqn, Leaf(held.path or (fqn,), content="unread")


Shapes = Mapping[Words, tuple[int, ...] | None]
"""The shapes of weights by the words of their paths."""


def counts_steps(key: str) -> bool:
    """Whether a number under a key at the top of a saved state counts the steps of the run."""
    (kind,) = kinds_of([Leaf((key,), content="count")])
    return kind.names == ("step",)


def kinds_of(
    leaves: Sequence[Leaf], front: Words = (), mapped: StateMap = (), beside: Shapes = _NOTHING
) -> Sequence[StateKind]:
    """The kind of each entry of one state, in order.

    `front` are words that count as the first of each path: the name of a folder. `beside` are the
    weights in the other files of the step. Cost: a few set look-ups for each; where nothing names
    an optimizer, a few more for each tensor.
    """
    words = [(*front, *_words(leaf.path)) for leaf in leaves]
    content = _Content(leaves, words, beside)
    return [
        _mapped(path, mapped) or content.kind(leaf, path)
        for leaf, path in zip(leaves, words, strict=True)
    ]


_SEPARATORS = str.maketrans("/:|", "...")
"""What stands between the words of a key, besides dots."""


def _words(path: Path) -> Words:
    text = ".".join(map(str, path)).lower().translate(_SEPARATORS)
    return tuple(text.replace("..", ".").split("."))


def is_of_adapter(leaf: Leaf) -> bool:
    """Whether a weight is one that an adapter (LoRA, …) adds to a base model."""
    return leaf.is_weight and not _WORDS.of_adapter.isdisjoint(_words(leaf.path))


def weights_of(leaves: Iterable[Leaf]) -> Shapes:
    """The weights among the entries of a state: what `kinds_of` takes as `beside`."""
    return {_words(leaf.path): leaf.shape for leaf in leaves if leaf.is_weight}


def _mapped(words: Words, mapped: StateMap) -> StateKind | None:
    for kind, key in mapped:
        wanted = _words((key,))
        if words[: len(wanted)] == wanted:
            return StateKind((kind,), _rank_in(words))
    return None


class _Content:
    """What the entries of one state show together."""

    def __init__(self, leaves: Sequence[Leaf], words: Sequence[Words], beside: Shapes) -> None:
        self._beside = beside
        self._children: dict[Words, dict[str, Leaf]] = defaultdict(dict)
        self._weights: dict[Words, tuple[int, ...] | None] = {}
        self._nested: list[Words] = []
        """Paths of weights that lie in a mapping, and not under a flat key."""
        self._with_weights: set[Words] = set()
        self._above_modules: set[Words] = set()
        """Paths with a weight two words or more below, as of a module that has modules."""
        for leaf, path in zip(leaves, words, strict=True):
            self._children[path[:-1]][path[-1]] = leaf
            if leaf.is_weight:
                self._weights[path] = leaf.shape
                self._above_modules.update(path[:n] for n in range(1, len(path) - 1))
                if outermost_key(leaf) != ".".join(map(str, leaf.path)):
                    self._nested.append(path)
        self._below: dict[Words, str] = {}
        """Paths below which all is of one kind."""
        self._of_owner: dict[Words, str | None] = {}
        self._note_marks(words)
        n_before = len(self._below)
        self._note_groups(words)
        self._note_moments(words)
        if len(self._below) == n_before:
            self._note_structure()
        for path in self._weights:
            if self._kind_below(path) is None:
                owners = (
                    path[:n] for n in range(1, len(path)) if path[n - 1] not in _WORDS.wrappers
                )
                self._with_weights.update(owners)
        self._named_optimizers = self._optimizers_by_name(leaves, words)
        self._generators = {
            path[:n]
            for leaf, path in zip(leaves, words, strict=True)
            if _is_generator_leaf(leaf)
            for n in {len(path) - 1, max(len(path) - 2, 1)}
        }

    def kind(self, leaf: Leaf, path: Words) -> StateKind:
        """The kind of one of the entries."""
        if leaf.content == "loader":
            return _LOADER_ITSELF
        below = self._kind_below(path)
        if below is not None:
            return StateKind((below,), _rank_in(path) if below == "dataloader" else None)
        is_short = leaf.dtype == "uint8" and leaf.shape == (CUDA_RNG_BYTES,)
        is_near = is_short and bool({path[:-1], path[:-2]} & self._generators)
        is_named = is_short and not _WORDS.generators.isdisjoint(path)
        if _is_generator_leaf(leaf) or is_near or is_named:
            return StateKind(("rng",), _rank_in(path))
        words = _unwrapped(path)
        head = words[0]
        if path[: len(path) - len(words) + 1] in self._named_optimizers:
            return _OPTIMIZER
        if _matches(_WORDS.model_head, head) or leaf.is_weight or self._is_buffer(leaf, path):
            return _COPY if leaf.is_weight and head in self._copies else _MODEL
        return self._by_words(leaf, path, words)

    def _by_words(self, leaf: Leaf, path: Words, words: Words) -> StateKind:
        head, leaf_word = words[0], words[-1]
        for front, pattern, kind in _HEADS:
            if any(_matches(pattern, w) for w in words[: 1 if _is_no_state(head) else front]):
                return StateKind((kind,), None if kind == "scheduler" else _rank_in(path))
        is_number = leaf.shape in (None, ()) and leaf.content not in ("plain", "settings", "rng")
        if is_number and len(words) <= _MAX_STEP_DEPTH:
            if leaf_word in _WORDS.token_leaves:
                return StateKind(("tokens",)) if leaf.value != 0 else _OTHER
            if leaf_word in _WORDS.step_leaves and (len(words) == 1 or not _is_no_state(head)):
                return StateKind(("step",))
        if leaf_word in _WORDS.scheduler_leaves and not _is_no_state(head):
            return _SCHEDULER
        if leaf.content in ("plain", "settings") or _is_no_state(head):
            return _OTHER
        if "_extra_state" in words:
            return _OTHER
        if leaf.shape is not None and len(leaf.shape) > 1:
            return _MODEL
        if leaf.shape == () and "float" in leaf.dtype:
            return _MODEL
        if leaf.content == "count" or leaf.shape == ():
            return StateKind(("other",), may_be=_SCALARS_ONLY)
        may_be = _ANYTHING if leaf.content == "unread" or leaf.shape else _NO_TENSORS
        return StateKind(("other",), may_be=may_be)

    def _is_buffer(self, leaf: Leaf, path: Words) -> bool:
        """Whether an entry is a tensor beside weights, as the counts of a normalization are.

        Of a flat state, a tensor of one element was read as a number.
        """
        is_flat = len(leaf.path) == 1 and len(path) > 1
        is_tensor = leaf.shape is not None or (is_flat and leaf.content == "count")
        return is_tensor and path[:-1] in self._with_weights

    def _kind_below(self, path: Words) -> str | None:
        """The kind of all that lies below one of the fronts of a path, the shortest first."""
        owner = path[:-1]
        if owner not in self._of_owner:
            below = (self._below.get(path[:n]) for n in range(1, len(path)))
            self._of_owner[owner] = next((kind for kind in below if kind), None)
        return self._of_owner[owner] or self._below.get(path)

    def _note_marks(self, words: Iterable[Words]) -> None:
        """Find schedulers, data loaders and scalers by keys that only they have together."""
        for owner, children in self._children.items():
            names = children.keys()
            if not owner:
                # A file of its own has the state of a scaler at its top.
                if names >= SCALER_MARKS and len(names) <= _MOST_IN_A_SCALER:
                    self._below.update({(name,): "other" for name in names})
                continue
            if "last_epoch" in names and not _WORDS.scheduler_marks.isdisjoint(names):
                self._below[owner] = "scheduler"
            elif (
                "epoch" in names
                and not _WORDS.positions.isdisjoint(names)
                and names <= _WORDS.positions | _WORDS.beside_positions
            ):
                self._below.setdefault(owner, "dataloader")
            elif names >= SCALER_MARKS:
                self._below[owner] = "other"
            elif "bit_generator" in names and not _WORDS.of_bit_generators.isdisjoint(names):
                self._below[owner] = "rng"

        for path in words:
            if not _WORDS.dataloader_marks.isdisjoint(path) and path not in self._weights:
                at = next(n for n, word in enumerate(path) if word in _WORDS.dataloader_marks)
                self._below.setdefault(path[: max(at, 1)], "dataloader")

    def _note_groups(self, words: Iterable[Words]) -> None:
        """Find optimizers by their groups of parameters, and what lies beside these."""
        for owner, children in self._children.items():
            is_group = owner and children.keys() >= _WORDS.of_a_group
            if is_group and (owner[-1].isdigit() or children["params"].content == "settings"):
                n_words = max(
                    (n for n, word in enumerate(owner, 1) if not word.isdigit()), default=0
                )
                self._add([owner[:n_words] or owner])
        for path in words:
            if "param_groups" not in path or path in self._weights:
                continue
            root = path[: path.index("param_groups")]
            if root and root[-1] not in _WORDS.wrappers:
                self._add([root])
            else:
                self._add([(*root, "param_groups"), (*root, "state")])

    def _note_moments(self, words: Iterable[Words]) -> None:
        """Find averages of gradients by their names, beside or above those of parameters."""
        inner: dict[tuple[Words, Words], set[str]] = defaultdict(set)
        found: set[Words] = set()
        for path in words:
            if _WORDS.moments.isdisjoint(path) or self._kind_below(path) is not None:
                continue
            at = next(n for n in range(len(path) - 1, -1, -1) if path[n] in _WORDS.moments)
            owner, rest = path[:at], path[at + 1 :]
            if not rest and owner in self._above_modules:
                continue  # buffers of a module
            names = {*self._children[owner]} if not rest else set()
            is_pair = "step" in names or len(_WORDS.moments & names) > 1
            is_named = any(_matches(_WORDS.optimizer_head, word) for word in owner[:2])
            is_named = is_named or ("state" in owner and not rest)
            is_numbered = bool(owner) and owner[-1].isdigit()
            # The owner may also end with the path of a parameter, which lies elsewhere.
            if is_named or is_pair or is_numbered or any(True for _ in self._parameters(owner)):
                found.add(owner if not rest else path)
            elif rest:
                inner[owner, rest].add(path[at])
        self._add(found)
        for (owner, rest), names in inner.items():
            for name in names if len(names) > 1 else ():
                self._add([(*owner, name, *rest)])

    def _add(self, optimizers: Iterable[Words]) -> None:
        for path in optimizers:
            self._below.setdefault(path, "optimizer")
        self._of_owner.clear()

    def _parameters(self, owner: Words) -> Iterator[Words]:
        """Paths of parameters with which a longer path ends, of another top level."""
        for n in range(len(owner)):
            for param in self._by_tail.get(owner[n:], ()):
                if param in self._beside or (n and _unwrapped(param)[0] != _unwrapped(owner)[0]):
                    yield param

    def _shape_of(self, param: Words) -> tuple[int, ...] | None:
        return self._weights.get(param) or self._beside.get(param)

    @cached_property
    def _by_tail(self) -> Mapping[Words, Sequence[Words]]:
        tails = defaultdict(list)
        for path in (*self._weights, *self._beside):
            for n in range(min(len(path), _MAX_FRONT)):
                tails[path[n:]].append(path)
        return tails

    def _note_structure(self) -> None:
        """Find state that is kept of each parameter under names that are common."""
        self._add(
            owner
            for owner, children in self._children.items()
            if owner and len(children) > 1 and self._is_owner_of_slots(owner, children)
        )
        pairs: dict[tuple[Words, Words], list[Words]] = defaultdict(list)
        for path in self._weights:
            for one, other in _WORDS.pairs:
                if one not in path[:-1]:
                    continue
                at = path.index(one)
                fronts = path[: at + 1], (*path[:at], other)
                twin = (*fronts[1], *path[at + 1 :])
                if self._weights.get(twin) == self._weights[path] and self._is_twin(path, twin, at):
                    pairs[fronts].append(path)
        for fronts, found in pairs.items():
            # Of a module that is called so, most weights of the model lie elsewhere.
            n_others = len(self._weights) + len(self._beside) - 2 * len(found)
            if 2 * len(found) >= n_others:
                self._add(fronts)

    def _is_twin(self, path: Words, twin: Words, at: int) -> bool:
        """Whether a parameter elsewhere has the name that stands behind `path[at]`."""
        name = path[at + 1 :]
        return any(
            self._shape_of(param) == self._weights[path]
            for param in self._by_tail.get(name, ())
            if param not in (path, twin)
            and (at == 0 or _unwrapped(param)[0] != _unwrapped(path)[0])
            and (len(name) > 1 or all(map(_is_wrapper_or_model, param[:-1])))
        )

    @cached_property
    def _copies(self) -> frozenset[str]:
        """The heads of tensors that may be averages of gradients: as the parameters, or flat.

        None where anything is known as an optimizer.
        """
        if self._named_optimizers or "optimizer" in self._below.values():
            return frozenset()
        shapes: dict[str, set[tuple[int, ...] | None]] = defaultdict(set)
        for path in self._nested:
            shapes[_unwrapped(path)[0]].add(self._weights[path])
        models = [head for head in shapes if _matches(_WORDS.model_head, head)]
        if not (models or self._beside):
            models = [*shapes][:1]
        of_models = [
            *self._beside.values(),
            *(self._weights[path] for path in self._nested if _unwrapped(path)[0] in models),
        ]
        known = {*of_models}
        n_few = sum(prod(shape or ()) for shape in of_models) // _MOST_PARTS
        return frozenset(
            head
            for head, held in shapes.items()
            if head not in models
            and all(
                shape in known or (shape is not None and len(shape) == 1 and shape[0] > n_few)
                for shape in held
            )
        )

    def _is_owner_of_slots(self, owner: Words, children: Mapping[str, Leaf]) -> bool:
        """Whether a path is that of a parameter, and its children the state kept of it."""
        is_class = frozenset(children) in _WORDS.slots_of_classes
        # Quantized averages are integers of the shape of the parameter.
        shapes = [leaf.shape for leaf in children.values() if leaf.shape]
        is_counted = "step" in children and bool(shapes)
        if owner[-1].isdigit():
            is_pair = any({one, other} <= children.keys() for one, other in _WORDS.pairs)
            is_pair = is_pair or len({*shapes}) < len(shapes)
            return is_class or (is_counted and (is_pair or "state" in owner))
        for param in self._parameters(owner):
            n_slots = sum(shape == self._shape_of(param) for shape in shapes)
            if is_counted or n_slots > 1 or (is_class and (n_slots or "row_var" in children)):
                return True
        return False

    def _optimizers_by_name(self, leaves: Sequence[Leaf], words: Sequence[Words]) -> set[Words]:
        """The heads called an optimizer below which something is that belongs to no weights."""
        heads: set[Words] = set()
        for leaf, path in zip(leaves, words, strict=True):
            own = _unwrapped(path)
            if not _matches(_WORDS.optimizer_head, own[0]):
                continue
            is_of_model = leaf.is_weight or self._is_buffer(leaf, path)
            if not is_of_model or "state" in own[1:] or self._kind_below(path) == "optimizer":
                heads.add(path[: len(path) - len(own) + 1])
        return heads


_MOST_PARTS = 16
"""One flat tensor of all parameters is cut into at most so many parts to be known as one."""

_MAX_FRONT = 4
"""So many words may lie in front of the name of a parameter."""


def _is_generator_leaf(leaf: Leaf) -> bool:
    is_tensor = leaf.dtype == "uint8" and leaf.shape == (CPU_RNG_BYTES,)
    return leaf.content == "rng" or is_tensor


@lru_cache(maxsize=1 << 12)
def _matches(pattern: str, word: str) -> bool:
    """Whether a whole word matches; the words of paths repeat."""
    return re.fullmatch(pattern, word) is not None


def _is_wrapper_or_model(word: str) -> bool:
    return word in _WORDS.wrappers or _matches(_WORDS.model_head, word)


def _is_no_state(head: str) -> bool:
    return is_scaler_name(head) or _matches(_WORDS.no_state_head, head)


def _unwrapped(words: Words) -> Words:
    first = next((i for i, word in enumerate(words) if word not in _WORDS.wrappers), len(words) - 1)
    # A bare optimizer state dict begins with `state` itself.
    bare_state = first > 0 and words[first - 1] == "state" and words[-1] in _WORDS.moments
    return words[first - 1 :] if bare_state else words[first:]


def _rank_in(words: Sequence[str]) -> str | None:
    words = _unwrapped(tuple(words))
    for at, word in enumerate(words):
        if word.startswith("shard_"):
            # Megatron's ShardedObject: `shard_{offsets}_{shape}`, dots inside both.
            return ".".join(words[at:])
        match = re.fullmatch(_WORDS.rank, word) or re.fullmatch(_WORDS.rng_of_rank, word)
        if match:
            return match["rank"]
        if word.isdigit() and words[0].startswith(("rng", "random")):
            return word
    return None


def entry_kinds(
    metadata: Metadata, part_path: str = "", mapped: StateMap = (), beside: Shapes = _NOTHING
) -> Mapping[str, StateKind]:
    """The kind of every entry of a metadata, by FQN. Cost: as `kinds_of`.

    The folder of the part counts too: `optimizer_0/` holds the optimizer, and with it
    sometimes the scheduler.
    """
    folder = part_path.rsplit("/", maxsplit=1)[-1]
    is_optimizer = _matches(_WORDS.optimizer_head, folder)
    front = (folder,) if is_optimizer or _matches(_WORDS.model_head, folder) else ()
    entries = [*entries_of(metadata)]
    leaves = [leaf for _, leaf in entries]
    found = kinds_of(leaves, front, mapped, beside)
    kinds = {fqn: kind for (fqn, _), kind in zip(entries, found, strict=True)}
    if is_optimizer:
        alone = kinds_of(leaves, (), mapped)
        guests = zip(metadata.bytes_entries, alone[len(metadata.tensors) :], strict=True)
        kinds |= {fqn: kind for fqn, kind in guests if kind.names == ("scheduler",)}
    return kinds


def kinds_in_file(
    leaves: Sequence[Leaf],
    by_name: StateKind | None,
    mapped: StateMap = (),
    path: str = "",
    beside: Shapes = _NOTHING,
) -> Sequence[StateKind]:
    """The kind of each entry of the file at `path`, whose name states `by_name`.

    The name decides about what neither content nor keys do, and about all of a file of one kind
    that it restores whatever its keys are.
    """
    as_mapped = mapped_file(path, mapped)
    if as_mapped:
        return [StateKind((as_mapped,), by_name.rank if by_name else None)] * len(leaves)
    if by_name is not None and by_name.names == by_name.always and len(by_name.names) == 1:
        return [by_name] * len(leaves)
    if by_name is None and file_holds_no_state(path):
        return [_OTHER] * len(leaves)
    kinds = kinds_of(leaves, (), mapped, beside)
    if by_name is None or len(by_name.names) > 1:
        return kinds
    if _is_one_scalar(leaves, by_name):
        return [_OTHER]
    is_open = all(kind.names == ("other",) for kind in kinds)
    weak = ("model",) if by_name.of_framework else ()
    return [by_name if kind.may_be or is_open or kind.names == weak else kind for kind in kinds]


def _is_one_scalar(leaves: Sequence[Leaf], by_name: StateKind) -> bool:
    """Whether a file that is named as that of tensors holds a number or a text and nothing else."""
    is_scalar = len(leaves) == 1 and not leaves[0].path and leaves[0].content in ("count", "plain")
    return is_scalar and by_name.names[0] in ("model", "optimizer", "scheduler", "rng")


def file_holds_no_state(path: str) -> bool:
    """Whether the name of a file is that of settings: `training_args.bin`."""
    return _matches(_WORDS.settings_file, path.rpartition("/")[2].lower())


def holds_output(path: str, leaves: Sequence[Leaf]) -> bool:
    """Whether a file holds what an evaluation wrote, and no state: predictions, scores, a report.

    `leaves` are its entries. None of them is state of a known kind, and the keys of all are those
    of outputs, with one that no state has or with the name of an output. An array without a key
    counts by the last word of the name (`predictions.npy`, `logits_3.pt`). What else is in a file
    may be state, whatever its name is.
    """
    stem, _, suffix = path.lower().rpartition("/")[2].rpartition(".")
    is_named = is_named_as_output(_last_word(re.split("[-_.]", stem)))
    if not leaves:
        return suffix == "npy" and is_named
    if any({*kind.names} - {"model", "other"} for kind in kinds_of(leaves)):
        return False
    words = {_last_word(_words(leaf.path)) for leaf in leaves if leaf.shape or not leaf.path}
    words |= {_last_word(_words(leaf.path)) for leaf in leaves} - _BESIDE_OUTPUT
    if not all(_matches(_WORDS.output_leaf, word) if word else is_named for word in words):
        return False
    return is_named or not words.isdisjoint(_OF_OUTPUTS_ALONE) or is_named_as_output(path)


def is_named_as_output(path: str) -> bool:
    """Whether a name has a word of an evaluation: a hint, which alone proves nothing."""
    return _matches(_WORDS.output_file, path.lower())


_OF_OUTPUTS_ALONE = frozenset(
    {"logits", "preds", "predictions", "probs", "probabilities", "accuracy", "perplexity"}
)
"""Keys that no state has."""


def _last_word(words: Sequence[str]) -> str:
    return next((word for word in reversed(words) if not word.isdigit()), "")


_BESIDE_OUTPUT = frozenset({"step", "epoch", "split", "name", "dataset", "n", "count", "time"})
"""Keys of the numbers and texts that an evaluation writes beside its outputs."""


def mapped_file(path: str, mapped: StateMap) -> str:
    """The kind that a person maps a whole file to, by its path or its name; empty for none."""
    names = (path, path.rpartition("/")[2])
    return next((kind for kind, key in mapped if key in names), "")


def outermost_key(leaf: Leaf) -> str:
    """The key under which an entry is reported: up to the first that is no wrapper."""
    keys = [str(key) for key in leaf.path]
    first = next(
        (i for i, key in enumerate(keys) if key.lower() not in _WORDS.wrappers), len(keys) - 1
    )
    return ".".join(keys[: first + 1])


def optimizer_is_hollow(leaves: Iterable[Leaf]) -> bool:
    """The optimizer's entries are settings of one that keeps state, without any state.

    A plain `optimizer.state_dict()` of a fresh Adam has this form: a resume
    from it starts the moments at zero.
    """
    settings: set[str] = set()
    for leaf in leaves:
        words = _words(leaf.path)
        if "param_groups" in words:
            settings |= {*words[words.index("param_groups") :]}
        elif leaf.shape or leaf.content == "unread":
            return False
    return bool(settings & _WORDS.settings_that_keep_state)


def optimizer_steps(metadata: Metadata) -> Mapping[str, str]:
    """The `step` counts that optimizers keep per parameter: the optimizer of each, by FQN."""
    counts = [
        (fqn, entry.path or tuple(fqn.split(".")))
        for fqn, entry in metadata.tensors.items()
        if entry.shape == () and _words(entry.path or (fqn,))[-1] == "step"
    ]
    kinds = entry_kinds(metadata) if counts else {}
    found = {}
    for fqn, path in counts:
        if kinds[fqn] == _OPTIMIZER:
            words = [*map(str, path)]
            found[fqn] = ".".join(words[: words.index("state") if "state" in words else 1])
    return found


def is_count_of_one_rank(key: str) -> bool:
    """Whether a count of tokens is that of one data-parallel rank, and not of the run.

    Source: torchtitan 0.3 `trainer.py` (`ntokens_seen`), which sums it over ranks only to log it;
    it saves the place in the data of each data-parallel rank.
    """
    return re.split("[.: ]", key)[-1] == "ntokens_seen"


def is_moment(path: Path) -> bool:
    """Whether the entry is one of the averages that an optimizer keeps of the gradients."""
    return not _WORDS.moments.isdisjoint(_words(path))
