"""Estimate whether resharding a step is worthwhile before loading it on another world size.

Everything is computed from the metadata: the bytes that the ranks need, and the bytes that
stock `dcp.load` reads for them, which is every record whole, once for each rank that needs
a part of it. `Reader`, and with it `Checkpointer`, reads only what is needed. Ranks are
assumed to be sharded as FSDP2 shards.

Resharding reads the step once and writes it once; it pays off once the excess reads of
stock loads exceed that. Load time is proportional to bytes (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.errors import StorageError, UsageError
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formatting import command_line, size
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level, Positive
from ckptctl.options import Requirements, StorageOptions
from ckptctl.storage.opening import join_url

if TYPE_CHECKING:
    from ckptctl.resharding.planning import Wanted
    from ckptctl.resharding.sources import Source

MAX_METADATA_BYTES = 8 << 20
"""A step with more metadata, some 60,000 chunks, gets no advice: counting would take seconds."""

MIN_GAIN_BYTES = 1 << 30
"""Smaller savings, about a second of fast storage, are not worth a command."""


@dataclass(frozen=True, slots=True)
class ReadAdvice:
    """What a load on `world_size` ranks reads, in bytes of tensors over all ranks."""

    world_size: Positive
    """Ranks that load, sharded as by FSDP2."""
    needed_bytes: int
    """Bytes of tensors that they need, over all ranks."""
    stock_bytes: int
    """Bytes that stock `dcp.load` reads for that: whole records."""
    pays_from: Positive | None
    """The number of loads from which resharding first is cheaper; null if it never is."""

    @property
    def message(self) -> str:
        """The advice in one line."""
        read = f"would read {size(self.stock_bytes)} for {size(self.needed_bytes)} needed"
        if self.pays_from is None:
            return f"no need to reshard first: stock dcp.load {read}"
        ours = "Reader and Checkpointer read only these"
        if self.pays_from == 1:
            return f"resharding first pays with stock dcp.load, which {read}; {ours}"
        return (
            f"no need to reshard first: stock dcp.load {read}, and resharding first would pay "
            f"from load {self.pays_from:,} on; {ours}"
        )

    def document(self) -> dict[str, object]:
        """The same as JSON."""
        from dataclasses import asdict

        return {**asdict(self), "message": self.message}


def advise(opened: OpenStep, world_size: int) -> ReadAdvice | None:
    """The advice for an intact step; None as for `countable`.

    Cost: that of `countable`, and some 10 µs per chunk.
    """
    source = countable(opened)
    return None if source is None else advice_for(source, world_size)


def countable(opened: OpenStep) -> Source | None:
    """The step in the form that `advice_for` takes.

    None if it is not sharded DCP, has too much metadata, or the storage fails: nothing
    depends on the advice. Cost: one listing and the metadata, as far as they were not read.
    """
    from ckptctl.resharding.sources import source_of

    try:
        sizes = (one.size for one in opened.files if one.path.endswith(METADATA))
        if sum(sizes) > MAX_METADATA_BYTES:
            return None
        source = source_of(inspect_step(opened, Requirements(grace_s=0.0), level=Level.LISTING))
    except (StorageError, UsageError):
        return None
    return source if source.parts else None


def advice_for(source: Source, world_size: int) -> ReadAdvice:
    """The advice for an inspected step. Pure."""
    from ckptctl.resharding.mesh import Mesh
    from ckptctl.resharding.planning import Wanted

    wanted = Wanted(Mesh((("dp", world_size),)))
    total = needed = stock = 0
    for n_taken, n_record, n_ranks in _reads(source, wanted):
        total += n_taken
        needed += n_taken * n_ranks
        stock += n_record * n_ranks
    gain = stock - needed
    if gain < MIN_GAIN_BYTES:
        return ReadAdvice(world_size, needed, stock, None)
    return ReadAdvice(world_size, needed, stock, max(1, round(2 * total / gain)))


def _reads(source: Source, wanted: Wanted) -> Iterator[tuple[int, int, int]]:
    """For each piece of a record that goes to some ranks: its bytes, the record's, the ranks."""
    from ckptctl.resharding.planning import one_writer, slices_for

    alone = one_writer(source)
    for part in source.parts:
        for tensor in part.tensors:
            item_bytes = tensor.item_bytes
            for one in slices_for(part, tensor, wanted, alone):
                for overlap in tensor.overlaps(one.elements):
                    whole = tensor.chunks[overlap.number].elements.n_elements
                    n_taken = overlap.elements.n_elements * item_bytes
                    yield n_taken, whole * item_bytes, len(one.ranks)


def command(root: str, name: str, world_size: int, storage: StorageOptions) -> str:
    """The command that reshards a step of `root`, into a root beside it."""
    target = join_url(f"{root.rstrip('/')}-for-{world_size}", name)
    words = ["reshard", join_url(root, name), target, "--world-size", str(world_size)]
    return command_line(*words, *storage.arguments(), "--apply")
