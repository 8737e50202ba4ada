"""Inspect the bytes of a step at level `content`.

Combines the parts of a step into one pass over their bytes, and adds the results to what
`structure` found. Where there is a seal, its digests are compared in the same pass. A subset is
chosen by bytes, in the order in which the records lie in the files, and is always the same for
one step.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from ckptctl.data_classes import dataclass, field, replace
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.findings import NOTHING_PROVEN, Finding, Proven
from ckptctl.formats.archive.safetensors import SUFFIX
from ckptctl.formats.own.seals import Seal
from ckptctl.formatting import command_line, counted, inside
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.record_content import Choose, ContentCheck, RecordResults, unverifiable
from ckptctl.inspection.sealed_bytes import check_sealed_bytes, comparable, proven
from ckptctl.model import FileInfo, Part
from ckptctl.records.byte_pass import BlockDigests, Limits, RecordRun, Run, read_runs
from ckptctl.records.content_runs import record_runs


@dataclass(frozen=True, slots=True)
class Asked:
    """How the bytes of a step are to be read, which of its records, and together with whom.

    With `nan_scan` the values of floating-point tensors are scanned too.
    """

    limits: Limits = field(default_factory=Limits)
    choose: Choose | None = None
    group: ProcessGroup = field(default_factory=ProcessGroup)
    nan_scan: bool = False

    @property
    def is_helper(self) -> bool:
        """Another process makes the report, and asks all that is not in the bytes."""
        return not self.group.is_first


@dataclass(frozen=True, slots=True)
class ContentInspection:
    """What comparing the bytes found, and whether the `whole` step was compared."""

    findings: tuple[Finding, ...]
    proven: Proven
    n_read: int
    whole: bool


class SealComparison:
    """Every byte of the sealed files of a step, block by block, against its seal.

    `folder` is the step in the store, `files` its listing; files of `passed_over` have a
    finding already.
    """

    def __init__(
        self, folder: str, seal: Seal, files: Sequence[FileInfo], passed_over: Collection[str] = ()
    ) -> None:
        self._seal = seal
        self._files = comparable(seal, files, passed_over)
        sizes = {file.path: file.size for file in self._files}
        self._digests = BlockDigests(folder, sizes, seal.algorithm)

    def runs(self, others: Sequence[RecordRun] = ()) -> list[Run]:
        """What to read: `others`, digested where they are blocks, and the blocks that are not."""
        return self._digests.runs(others)

    @property
    def whole(self) -> bool:
        """All of it was read."""
        return self._digests.whole

    @property
    def proven(self) -> frozenset[str]:
        """The files that are what was sealed, to the last byte."""
        return proven(self._files, self._digests.found)

    def findings(self) -> Iterator[Finding]:
        """Yield a `seal.digest` for each file with a block that is not what was sealed."""
        return check_sealed_bytes(self._seal, self._files, self._digests.found)


def inspect_content(
    opened: OpenStep, asked: Asked | None, seal: Seal | None, passed_over: Collection[str] = ()
) -> ContentInspection:
    """Compare every byte of a step's records with their checksums.

    Where the step has a `seal` and no part of its bytes is chosen, all files are compared
    with it too; those `passed_over` differ from it already. Storage errors pass through.
    Cost: every byte once, of the records, and of all files where there is a seal.
    """
    asked = asked or Asked()
    sealed = None
    if seal is not None and asked.choose is None:
        sealed = SealComparison(opened.folder, seal, opened.files, passed_over)
    parts = [part for part in (*opened.parts, opened.beside) if part and part.metadata]
    checks = [
        ContentCheck(part.ranges, part.part.files, part.path, choose=_own_share(asked))
        for part in parts
    ]
    of_records = [
        run
        for part, check in zip(parts, checks, strict=True)
        for run in record_runs(part.source, check.by_file, check.report, nan_scan=asked.nan_scan)
    ]
    group = asked.group
    limits = replace(asked.limits, on_progress=group.watch(asked.limits.on_progress))
    runs = sealed.runs(of_records) if sealed else of_records
    digests = " ".join(one.digest for part in parts for one in part.metadata)

    def read_share() -> tuple[str, int, tuple[RecordResults, ...]]:
        n_bytes = read_runs(opened.store, runs, limits)
        return digests, n_bytes, tuple(check.outcome for check in checks)

    shares = group.share(read_share)
    for rank, (read_digests, _, outcomes) in enumerate(shares):
        if read_digests != digests:
            raise StorageUnavailable(
                f"{opened.url}: the processes do not read the same metadata: the step is being "
                "written, or the machines do not see the same storage",
                next_command=command_line("verify", opened.url, "--level", "content"),
            )
        if rank != group.rank:
            for check, outcome in zip(checks, outcomes, strict=True):
                check.add(outcome)
    n_read = sum(n_bytes for _, n_bytes, _ in shares)
    as_sealed = sealed.proven if sealed else frozenset()
    found = [*sealed.findings()] if sealed else []
    found += [finding for check in checks for finding in check.findings(as_sealed)]
    for part in opened.parts:
        for held in part.safetensors:
            found += _of_safetensors(held.part, as_sealed)
    proven = sum((check.proven for check in checks), NOTHING_PROVEN)
    finished = all(check.whole for check in checks) and (sealed is None or sealed.whole)
    whole = finished and asked.choose is None
    if not finished:
        found.append(_not_all(proven, opened.url, "content.unfinished"))
    elif not whole:
        found.append(_not_all(proven, opened.url, "content.partial"))
    return ContentInspection(tuple(found), proven, n_read, whole)


def _own_share(asked: Asked) -> Choose | None:
    """The records that this process reads: of those that were asked for, its share by bytes."""
    group, choose = asked.group, asked.choose
    if group.size == 1:
        return choose

    def chosen(lengths: Sequence[int]) -> Collection[int]:
        places = sorted(choose(lengths)) if choose is not None else range(len(lengths))
        own = share([lengths[place] for place in places], group.rank + 1, group.size)
        return [places[place] for place in own]

    return chosen


def _of_safetensors(part: Part, sealed: Collection[str]) -> Iterator[Finding]:
    files = [file.path for file in part.files if file.path.endswith(SUFFIX)]
    unproven = [path for path in files if inside(part.path, path) not in sealed]
    if unproven:
        n_files = counted(len(unproven), "safetensors file")
        yield unverifiable(part.path, f"{n_files} without checksums")


def _not_all(proven: Proven, url: str, code: str) -> Finding:
    until = "until the inspection ended, " if code == "content.unfinished" else ""
    return Finding(
        code,
        "",
        f"{until}{proven.n_bytes:,} of {proven.n_asked:,} bytes in records match their "
        "checksums; the others were not compared",
        expected=f"{proven.n_asked:,} bytes",
        found=f"{proven.n_bytes:,} bytes",
        next_command=command_line("verify", url, "--level", "content"),
    )


_SHARE = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


def parse_subset(text: str | None) -> Choose | None:
    """`3/7`, the third of seven parts, or `10%`, spread over all files; None for everything.

    Seven parts of a step hold each record once. Raises `UsageError` for other words.
    """
    if text is None:
        return None
    part = _SHARE.fullmatch(text)
    if part and 1 <= int(part[1]) <= int(part[2]):
        number, of = int(part[1]), int(part[2])
        return lambda lengths: share(lengths, number, of)
    percent = _PERCENT.fullmatch(text)
    if percent and 0 < float(percent[1]) <= 100:
        fraction = float(percent[1]) / 100
        return lambda lengths: _spread(lengths, fraction)
    raise UsageError(
        f"--subset is a part of several (3/7) or of all bytes (10%), not {text!r}",
        instead="--subset 1/7",
    )


def share(lengths: Sequence[int], number: int, of: int) -> Collection[int]:
    """The records whose middle lies in part `number` of `of` equal parts of all bytes."""
    total = sum(lengths)
    chosen = []
    before = 0
    for place, length in enumerate(lengths):
        middle = 2 * before + length
        if total and min(of - 1, middle * of // (2 * total)) == number - 1:
            chosen.append(place)
        before += length
    return chosen


def _spread(lengths: Sequence[int], part: float) -> Collection[int]:
    """As many records as come to `part` of the bytes, evenly over all of them, the first always."""
    chosen = []
    passed = taken = 0
    for place, length in enumerate(lengths):
        if taken <= passed * part:
            chosen.append(place)
            taken += length
        passed += length
    return chosen
