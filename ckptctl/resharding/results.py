"""The results of `reshard`, `convert` and `diff`, which the CLI prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptctl.findings import Finding, Report
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.model import ExitCode, Message, NextCommand, Positive, StepNumber


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of one target rank: its slices and entries, their bytes, and the reads needed."""

    rank: int
    """The rank that reads the file."""
    file: str
    """Its path in the step."""
    n_entries: int
    """Chunks and other entries in it."""
    n_bytes: int
    """Its size in bytes."""
    n_reads: int
    """Runs of the source's records that it is made of."""
    bytes_read: int
    """Bytes of the source that it is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """The result of `reshard`: how a step is, or was, resharded."""

    source: str
    """The address of the step that is resharded."""
    target: str
    """The address of the new step."""
    number: StepNumber = None
    saved_world_size: Positive | None
    """How many ranks saved the source; null where that is unknown."""
    world_size: int
    """How many ranks the new step is for."""
    written: bool = False
    """The new step was verified, sealed and published."""
    n_tensors: int = 0
    """Tensors of the new step."""
    n_cut: int = 0
    """Tensors in several chunks."""
    n_whole: int = 0
    """Tensors in one chunk."""
    n_bytes_entries: int = 0
    """Entries that are not tensors."""
    n_files: int = 0
    """Files of the new step, without its seal."""
    n_bytes: int = 0
    """Bytes of the new step, without metadata and seal."""
    shares: tuple[RankShare, ...] = ()
    """The content of each shard file, by part and rank."""
    findings: tuple[Finding, ...] = ()
    """Notes on what is copied and what is not."""
    report: Report
    """The report of the source."""
    continued: int = 0
    """Shard files that an earlier, interrupted call had written."""
    message: Message
    exit_code: ExitCode = 0
    next_command: NextCommand = None

    @property
    def largest(self) -> int:
        """The bytes of the largest shard file."""
        return max((share.n_bytes for share in self.shares), default=0)

    @property
    def smallest(self) -> int:
        """The bytes of the smallest shard file."""
        return min((share.n_bytes for share in self.shares), default=0)


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two steps differ."""

    fqn: str
    """The FQN of the entry."""
    what: str
    """What differs."""
    a: str | None
    """Its value in the one step."""
    b: str | None
    """Its value in the other step."""


@dataclass(frozen=True, slots=True)
class Diff:
    """The result of `diff`."""

    a: str
    """The address of one step."""
    b: str
    """The address of the other."""
    same: bool
    """Nothing differs, except possibly how tensors are sharded."""
    n_entries: int
    """Entries of both steps together, by FQN."""
    n_layouts: int
    """Tensors that are sharded differently."""
    one_step: bool
    """Both addresses are those of one step, so that there is nothing to compare."""
    values_compared: bool
    """Every value was compared."""
    n_by_checksum: int
    """Tensors whose values were compared by the checksums of their records."""
    n_by_bytes: int
    """Tensors whose values were compared byte by byte."""
    differences: tuple[Difference, ...]
    """The differences, layouts included."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The result of `convert`."""

    source: str
    """The address of what is converted."""
    target: str
    """The address of what is written."""
    format: str = ""
    """The format that was written: sharded DCP, a `torch.save` file, safetensors; empty where
    nothing was."""
    written: bool = False
    """It was written, and every byte was read back."""
    n_tensors: int = 0
    """Tensors that were written."""
    n_left_out: int = 0
    """Entries that the format cannot hold."""
    n_files: int = 0
    """Files that were written, without index and seal."""
    n_bytes: int = 0
    """Bytes of those files."""
    findings: tuple[Finding, ...] = ()
    """Notes on what is not converted."""
    report: Report
    """The report of the source; null where it is not a step."""
    message: Message
    exit_code: ExitCode = 0
    next_command: NextCommand = None


def not_converted(source: str, target: str, report: Report) -> Converted:
    """The result if the source, or what was made of it, is not complete."""
    deeper = command_line("verify", source, "--level", "content")
    given = (finding.next_command for finding in report.findings if finding.verdict is not None)
    return Converted(
        source=source,
        target=target,
        report=report,
        message=f"not converted: {report.url} is {report.verdict.value}; nothing was published",
        exit_code=report.exit_code,
        next_command=next((command for command in given if command), deeper),
    )


def left_out(
    names: Sequence[str], what: str, noun: str = "file", plural: str | None = None
) -> Iterator[Finding]:
    """The remark that a conversion leaves out what has these names; none without any."""
    if names:
        yield Finding(
            "state.left-out",
            "",
            f"left out: {counted(len(names), noun, plural)} {what}: {some_of(names)}",
            next_command="ckptctl explain state.left-out",
        )
