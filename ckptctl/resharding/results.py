"""The results of `plan_reshard`, `reshard`, `convert` and `diff`, which the CLI prints."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ckptctl.findings import Finding, Report


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of one target rank: its slices and entries, their bytes, and the reads needed.

    `n_bytes` is the size of its shard file, `bytes_read` what of the source's records
    goes into it.
    """

    rank: int
    file: str
    n_boxes: int
    n_bytes: int
    n_reads: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """The result of `plan_reshard` and `reshard`: how a step is, or was, resharded.

    `written` says that the target is there: proven at level `content`, sealed and
    published. `shares` are by part and rank; `n_bytes` is the size of all that is
    written, `n_files` how many files. `continued` are files that an earlier call had
    written and proven. `report` is what looking at the source found, or at the target
    once that is written; `findings` are remarks on what goes along. `next_command` is
    the one to run now.
    """

    source: str
    target: str
    number: int | None
    saved_world_size: int | None
    world_size: int
    mesh: str
    written: bool
    n_tensors: int
    n_cut: int
    n_whole: int
    n_bytes_entries: int
    n_files: int
    n_bytes: int
    shares: tuple[RankShare, ...]
    findings: tuple[Finding, ...]
    report: Report
    continued: int
    message: str
    exit_code: int
    next_command: str | None

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
    """One thing in which two steps differ.

    `what` is `only-in-a`, `only-in-b`, `kind`, `shape`, `dtype`, `values` or `layout`;
    `a` and `b` say it of either step. A layout is how a tensor is cut: it changes
    nothing in what is loaded.
    """

    fqn: str
    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Diff:
    """The result of `diff`.

    `same` says that nothing differs but perhaps the layout. With `values_compared`
    that includes every value: `n_by_checksum` tensors by the checksums of their
    records, `n_by_bytes` by their bytes. `n_layouts` tensors are cut differently.
    """

    a: str
    b: str
    same: bool
    n_entries: int
    n_layouts: int
    values_compared: bool
    n_by_checksum: int
    n_by_bytes: int
    differences: tuple[Difference, ...]
    message: str
    exit_code: int
    next_command: str | None


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of `convert`.

    `format` is that of the target: `dcp`, `flat` (a file of `torch.save`) or
    `safetensors`; empty where nothing was `written`: `report` says why. `n_left_out`
    counts entries for which the format has no place; `findings` name them, and files
    that do not go along.
    """

    source: str
    target: str
    format: str
    written: bool
    n_tensors: int
    n_left_out: int
    n_files: int
    n_bytes: int
    findings: tuple[Finding, ...]
    report: Report
    message: str
    exit_code: int
    next_command: str | None


def not_converted(source: str, target: str, report: Report) -> Converted:
    """The result if the source, or what was made of it, is not complete."""
    deeper = f"ckptctl verify {shlex.quote(source)} --level content"
    given = (finding.next_command for finding in report.findings if finding.verdict is not None)
    return Converted(
        source=source,
        target=target,
        format="",
        written=False,
        n_tensors=0,
        n_left_out=0,
        n_files=0,
        n_bytes=0,
        findings=(),
        report=report,
        message=f"not converted: {report.url} is {report.verdict.value}; nothing was published",
        exit_code=report.exit_code,
        next_command=next((command for command in given if command), deeper),
    )
