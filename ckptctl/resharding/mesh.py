"""Divide tensors among the ranks of a device mesh.

Tensors are sharded as FSDP2 and `torch.chunk` shard them: into pieces of equal size,
rounded up, so that the last ranks may hold less or nothing. With a mesh, tensor
parallelism shards first, and FSDP2 shards each piece. `planning` decides which tensors
are sharded.

Source: torch 2.13 `torch/distributed/tensor/placement_types.py` (`Shard`,
`_StridedShard`), `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from ckptctl.errors import OptionError, UsageError
from ckptctl.formatting import command_line
from ckptctl.records.slices import Dims, TensorSlice

SHARDING = ("dp", "fsdp")
"""Mesh dimensions that shard every sharded tensor, along dimension 0 unless a rule differs."""

BY_RULE = ("tp", "ep")
"""Mesh dimensions that shard only the tensors that `--shard` names."""

REPLICATING = ("rep", "replicate")
"""Mesh dimensions along which every rank holds the same."""

MAX_RANKS = 1 << 20
_DIMENSION = re.compile(r"(?P<name>[a-z]+)=(?P<size>[0-9]{1,7})")


class RankSlice(NamedTuple):
    """A slice of a tensor, and the ranks that hold it, in ascending order."""

    elements: TensorSlice
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The arrangement of ranks: name and size of each dimension, the last varying fastest."""

    dims: tuple[tuple[str, int], ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.dims)

    @property
    def shards_by_rule(self) -> bool:
        """Whether a dimension of the mesh shards only what `--shard` names."""
        return any(name in BY_RULE for name, _ in self.dims)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dims)


@dataclass(frozen=True, slots=True)
class ShardRule:
    """Shard the tensors whose FQN matches `pattern` along dimension `dim`."""

    pattern: str
    dim: int

    def fits(self, fqn: str) -> bool:
        """Whether the rule applies to a tensor; a pattern may omit leading and trailing names."""
        return fnmatchcase(f".{fqn}.", f"*.{self.pattern}.*")


def check_world_size(n_ranks: int | None) -> None:
    """Raise `UsageError` for a `--world-size` that no job has."""
    if n_ranks is not None and not 1 <= n_ranks <= MAX_RANKS:
        bound = "at least 1 is required" if n_ranks < 1 else f"at most {MAX_RANKS:,} are possible"
        raise OptionError("--world-size", f"is {n_ranks:,}; {bound}")


def parse_mesh(text: str) -> Mesh:
    """The mesh in `dp=4,tp=2`; raises `UsageError`."""
    dims = []
    for word in text.split(","):
        match = _DIMENSION.fullmatch(word.strip())
        if match is None or not int(match["size"]):
            raise _no_mesh(text, f"{word!r} is not a dimension")
        if match["name"] not in (*SHARDING, *BY_RULE, *REPLICATING):
            known = ", ".join((*SHARDING, *BY_RULE, *REPLICATING))
            raise _no_mesh(text, f"{match['name']!r} is none of {known}")
        dims.append((match["name"], int(match["size"])))
    mesh = Mesh(tuple(dims))
    if mesh.world_size > MAX_RANKS:
        raise _no_mesh(text, f"it has more than {MAX_RANKS:,} ranks")
    return mesh


def _no_mesh(text: str, why: str) -> UsageError:
    return OptionError(
        "--mesh", f"{text!r}: {why}; write it as dp=4,tp=2", instead="--mesh dp=4,tp=2"
    )


def parse_rules(given: Sequence[str]) -> tuple[ShardRule, ...]:
    """The rules in `--shard`, each `PATTERN=DIM`; raises `UsageError`."""
    rules = []
    for text in given:
        pattern, _, dim = text.rpartition("=")
        if not pattern or not dim.isdecimal() or len(dim) > 2:
            raise OptionError(
                "--shard",
                f"{text!r} is not PATTERN=DIM, with the dimension counted from 0",
                instead="--shard 'layers.*.wq.weight=1'",
            )
        rules.append(ShardRule(pattern, int(dim)))
    return tuple(rules)


def rule_for(fqn: str, rules: Sequence[ShardRule]) -> ShardRule | None:
    """The rule for a tensor: the last that fits, None if none does."""
    return next((rule for rule in reversed(rules) if rule.fits(fqn)), None)


def chunked(n: int, n_parts: int) -> tuple[tuple[int, int], ...]:
    """Start and length of each part that `torch.chunk` makes of `n` elements; some are empty."""
    each = -(-n // n_parts)
    return tuple((min(p * each, n), max(0, min(each, n - p * each))) for p in range(n_parts))


@lru_cache(maxsize=65_536)
def sharded(shape: Dims, mesh: Mesh, dim: int | None) -> tuple[RankSlice, ...]:
    """The slices of a sharded tensor, in the order of their first ranks; none is empty.

    `dim` is the dimension that a rule names. If the mesh has `tp` or `ep`, these shard
    along it and FSDP2 shards each piece along dimension 0; otherwise FSDP2 shards along it.
    """
    by_rule, others = (dim, 0) if mesh.shards_by_rule else (None, dim or 0)
    ranks_of: dict[TensorSlice, list[int]] = {}
    for rank, place in enumerate(product(*(range(size) for _, size in mesh.dims))):
        offsets, sizes = [0] * len(shape), [*shape]
        for names, along in ((BY_RULE, by_rule), (SHARDING, others)):
            for (name, size), at in zip(mesh.dims, place, strict=True):
                if name in names and along is not None and along < len(shape):
                    start, length = chunked(sizes[along], size)[at]
                    offsets[along] += start
                    sizes[along] = length
        ranks_of.setdefault(TensorSlice(tuple(offsets), tuple(sizes)), []).append(rank)
    return tuple(
        RankSlice(elements, tuple(ranks))
        for elements, ranks in ranks_of.items()
        if elements.n_elements
    )


def replicated(shape: Dims, world_size: int) -> tuple[RankSlice, ...]:
    """The one slice of a tensor that every rank holds; it may have no elements."""
    return (RankSlice(TensorSlice.whole(shape), tuple(range(world_size))),)


def check_rules(rules: Sequence[ShardRule], shapes: Mapping[str, Dims], url: str) -> None:
    """Raise `UsageError` for a rule that fits no tensor, or names a dimension that one lacks.

    `shapes` are those of the tensors of the step at `url`.
    """
    for rule in rules:
        fitting = {fqn: shape for fqn, shape in shapes.items() if rule.fits(fqn)}
        if not fitting:
            raise OptionError(
                "--shard",
                f"'{rule.pattern}={rule.dim}' matches no tensor of the step; names are as "
                "ckptctl show lists them, and * matches anything",
                next_command=command_line("show", url, "--tensors"),
            )
        short = [fqn for fqn, shape in fitting.items() if shape and len(shape) <= rule.dim]
        if short:
            n_dims = len(fitting[short[0]])
            raise OptionError(
                "--shard",
                f"'{rule.pattern}={rule.dim}': {short[0]} has {n_dims} dimensions, counted from 0",
                instead=f"--shard {shlex.quote(f'{rule.pattern}={n_dims - 1}')}",
            )


def check_mesh(mesh: Mesh, rules: Sequence[ShardRule], shapes: Mapping[str, Dims]) -> None:
    """Raise `UsageError` if a mesh dimension shards nothing because no rule applies to it."""
    idle = [f"{name}={size}" for name, size in mesh.dims if name in BY_RULE and size > 1]
    if not idle or rules:
        return
    largest = max(shapes, key=lambda fqn: (len(shapes[fqn]) > 1, prod(shapes[fqn])), default="w")
    words = ("*" if word.isdecimal() else word for word in largest.split("."))
    rule = f"{'.'.join(words)}=0"
    copies = ",".join(f"{'rep' if name in BY_RULE else name}={size}" for name, size in mesh.dims)
    raise OptionError(
        "--mesh",
        f"{mesh}: no tensor is sharded along {' and '.join(idle)}; --shard PATTERN=DIM "
        "names the tensors and the dimension; for ranks that hold copies, use "
        f"--mesh {copies}",
        instead=f"--shard {shlex.quote(rule)}",
    )
