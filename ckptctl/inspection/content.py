"""Inspect the bytes of a step at level `content`.

Each member of a record carries a CRC-32, which torch writes and never compares. One pass over the
bytes of all parts compares them (`records.verification` reads), and the seal's digests where there
is a seal. A subset is chosen by bytes, in the order in which the records lie in the files, and is
always the same for one step. `seals` detects correct bytes that belong to another step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import OptionError, StorageUnavailable
from ckptctl.findings import NOTHING_PROVEN, ByStore, Finding, Proven, at_most_few, explained
from ckptctl.formats.archive.safetensors import SUFFIX
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formats.frameworks.state_keys import is_moment_name, is_square
from ckptctl.formats.own.seals import SEAL, Seal, SealedFile, Stored
from ckptctl.formatting import command_line, counted, inside, some_of, verb
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.structure import SAYS, readable_ranges
from ckptctl.model import Checksum, FileInfo, Kept, Part, TensorEntry
from ckptctl.records.byte_pass import BlockDigests, Limits, read_runs
from ckptctl.records.not_finite import FORMS, Form, Values
from ckptctl.records.opening import ZSTD
from ckptctl.records.ranges import Ranges
from ckptctl.records.verification import NO_ZSTD, Checked, record_runs

Choose = Callable[[Sequence[int]], Collection[int]]
"""Which of the things whose lengths in bytes are given, in order, are to be read; by place."""


@dataclass(slots=True)
class RecordResults:
    """The results of the records of a part, in one process or in several that divide them.

    Records are numbers in the ranges of the part, which are the same in all as long as all read
    the same metadata.
    """

    n_chosen: int
    sound: list[int] = field(default_factory=list)
    wrong: dict[tuple[int, str], dict[int, Checked]] = field(default_factory=dict)
    unverifiable: dict[str, list[int]] = field(default_factory=dict)
    folds: dict[int, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)

    def add(self, other: RecordResults) -> None:
        """Add the results of other records of the part, from another process."""
        self.n_chosen += other.n_chosen
        self.sound += other.sound
        self.folds |= other.folds
        for place, alike in other.wrong.items():
            self.wrong.setdefault(place, {}).update(alike)
        for why, numbers in other.unverifiable.items():
            self.unverifiable.setdefault(why, []).extend(numbers)
        for fqn, values in other.values.items():
            self.add_values(fqn, values)

    def add_values(self, fqn: str, values: Values) -> None:
        """Add what was scanned of a tensor."""
        self.values[fqn] = self.values.get(fqn, Values()) + values


class ContentCheck:
    """Collects the results of the records of one part, and turns them into findings.

    `part_path` is where the part is in the step. `by_file` are the records to read, of
    each file in order: those that `files`, the part's listing, has room for (`presence`
    reports the others), and of these what `choose` takes.
    """

    def __init__(
        self,
        ranges: Ranges,
        files: Sequence[FileInfo],
        part_path: str = "",
        *,
        choose: Choose | None = None,
    ) -> None:
        self.ranges = ranges
        self.part_path = part_path
        # For those that went through something else, `structure` has a finding.
        by_file = [
            sorted(
                (n for n in numbers if ranges.owner(n).transforms in ((), (ZSTD,))),
                key=ranges.starts.__getitem__,
            )
            for numbers in readable_ranges(ranges, files)
        ]
        self.n_asked = sum(ranges.lengths[number] for numbers in by_file for number in numbers)
        self.by_file = by_file if choose is None else _chosen(ranges, by_file, choose)
        self.outcome = RecordResults(sum(map(len, self.by_file)))

    @property
    def whole(self) -> bool:
        """Every record that was chosen has been read."""
        n_wrong = sum(map(len, self.outcome.wrong.values()))
        n_unproven = sum(map(len, self.outcome.unverifiable.values()))
        return len(self.outcome.sound) + n_wrong + n_unproven == self.outcome.n_chosen

    @property
    def proven(self) -> Proven:
        """How much has been proven so far."""
        n_bytes = sum(self.ranges.lengths[number] for number in self.outcome.sound)
        n_values = sum(values.n_values for values in self.outcome.values.values())
        return Proven(self.n_asked, n_bytes, len(self.outcome.sound), n_values)

    def findings(self, sealed: Collection[str] = ()) -> Iterator[Finding]:
        """The findings about the bytes of the part that were read.

        Yields `record.crc`, `record.framing`, and of compressed records `record.mismatch` and
        `record.unsafe`, one for each file; `values.not-finite`,
        one for each tensor; one `record.unverifiable` for the records that nothing can
        prove. The files in
        `sealed` are proven by their seal; their paths are those in the step.
        """
        self._compare_folds()
        yield from at_most_few(
            self._finding(file, code, self.outcome.wrong[file, code])
            for file, code in sorted(self.outcome.wrong)
        )
        yield from self._without_proof(sealed)
        yield from at_most_few(
            self._not_finite(fqn, values)
            for fqn, values in sorted(self.outcome.values.items())
            if not values.finite
        )

    def report(self, number: int, checked: Checked) -> None:
        """Take the result of a record; see `records.verification.Report`."""
        if checked.values is not None:
            self.outcome.add_values(self.ranges.owner(number).entry.fqn, checked.values)
        if checked.wrong is not None:
            self._note(number, "record.crc", checked)
        elif checked.unreadable is not None:
            self._note(number, checked.unfit or "record.framing", checked)
        elif checked.unproven is not None:
            self.outcome.unverifiable.setdefault(checked.unproven, []).append(number)
        else:
            self.outcome.sound.append(number)
            if checked.folds is not None:
                self.outcome.folds[number] = checked.folds

    def _note(self, number: int, code: str, checked: Checked) -> None:
        place = self.ranges.files[number], code
        self.outcome.wrong.setdefault(place, {})[number] = checked

    def _compare_folds(self) -> None:
        """Checksums against `serialization_id`, which torch makes of them.

        How it does so is no promise: where no record of the part bears it out, a torch
        that does it in another way wrote them, and there is no finding.
        """
        folds, self.outcome.folds = self.outcome.folds, {}
        differing = [number for number, (saved, found) in folds.items() if saved != found]
        if len(differing) == len(folds):
            return
        for number in differing:
            self.outcome.sound.remove(number)
            reason = "its checksums are not those that its serialization_id was made from"
            self._note(number, "record.crc", Checked(unreadable=reason))

    def _finding(self, file: int, code: str, alike: Mapping[int, Checked]) -> Finding:
        ranges = self.ranges
        numbers = sorted(alike, key=ranges.starts.__getitem__)
        first = numbers[0]
        start = ranges.starts[first]
        path = ranges.file_names[file]
        n_bytes = sum(ranges.lengths[number] for number in numbers)
        names = some_of(list(dict.fromkeys(ranges.owner(n).entry.fqn for n in numbers)))
        expected = found = None
        why = alike[first].unreadable
        wrong = alike[first].wrong
        if wrong is not None:
            why = (
                f"{some_of(wrong.names)} (bytes {start + wrong.start:,} to {start + wrong.end:,} "
                "of the file)"
            )
            expected, found = f"CRC-32 {wrong.saved:08x}", f"CRC-32 {wrong.found:08x}"
        end = start + ranges.lengths[first]
        where = f"of {ranges.owner(first).name}, bytes {start:,} to {end:,}"
        one, many = SAYS[code]
        message = f"the record {where}, {one}: {why}"
        if len(numbers) > 1:
            message = (
                f"{len(numbers):,} records {many} ({n_bytes:,} bytes: {names}); the first is "
                f"that {where}: {why}"
            )
        return Finding(code, inside(self.part_path, path), message, expected, found)

    def _without_proof(self, sealed: Collection[str]) -> Iterator[Finding]:
        counts = []
        files: set[str] = set()
        for why, numbers in self.outcome.unverifiable.items():
            names = (self.ranges.file_names[self.ranges.files[number]] for number in numbers)
            paths = (inside(self.part_path, name) for name in names)
            unproven = [path for path in paths if path not in sealed]
            files.update(unproven)
            if unproven:
                counts.append(f"{counted(len(unproven), 'record')} {why}")
        if counts:
            what = f"{'; '.join(counts)} ({some_of(sorted(files))})"
            needs_zstd = NO_ZSTD in self.outcome.unverifiable
            hint = "pip install 'ckptctl[zstd]'" if needs_zstd else None
            yield unverifiable(self.part_path, what, hint)

    def _not_finite(self, fqn: str, values: Values) -> Finding:
        n_nan, n_infinite = values.n_nan, values.n_infinite
        counts = [f"{n_nan:,} {verb(n_nan, 'is', 'are')} NaN"] if n_nan else []
        if n_infinite:
            counts.append(f"{n_infinite:,} {verb(n_infinite, 'is', 'are')} infinite")
        least = "at least " if values.more else ""
        return explained(
            "values.not-finite",
            inside(self.part_path, fqn),
            f"of {counted(values.n_values, 'value')} scanned, {least}{' and '.join(counts)}: "
            "the tensor was saved with them",
            expected="finite values",
            found=f"{least}{n_nan:,} NaN, {n_infinite:,} infinite",
        )


def unverifiable(part_path: str, what: str, next_command: str | None = None) -> Finding:
    """The finding for bytes that nothing in the step can prove."""
    return Finding(
        "record.unverifiable",
        part_path,
        f"{what}; no seal covers them",
        next_command=next_command or "ckptctl explain record.unverifiable",
    )


def _chosen(ranges: Ranges, by_file: Iterable[Sequence[int]], choose: Choose) -> list[list[int]]:
    files = list(by_file)
    in_order = [number for numbers in files for number in numbers]
    taken = choose([ranges.lengths[number] for number in in_order])
    chosen = {in_order[place] for place in taken}
    return [[number for number in numbers if number in chosen] for numbers in files]


@dataclass(frozen=True, slots=True)
class Asked:
    """How the bytes of a step are to be read, which of its records, and together with whom.

    With `nan_scan` the values of floating-point tensors are scanned too, with `state_check` those
    that optimizers keep.
    """

    limits: Limits = field(default_factory=Limits)
    choose: Choose | None = None
    group: ProcessGroup = field(default_factory=ProcessGroup)
    nan_scan: bool = False
    state_check: bool = False

    def form_of(self, entry: TensorEntry) -> Form | None:
        """In which form the values of a tensor are scanned."""
        form = FORMS.get(entry.dtype)
        if form is None or not (self.state_check and is_moment_name(entry.fqn)):
            return form if self.nan_scan else None
        return replace(form, signs=is_square(entry.fqn))

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
    values: Mapping[str, Values] = field(default_factory=dict)
    """What was scanned, by the path of the part and the FQN."""


def comparable(
    seal: Seal, files: Sequence[FileInfo], passed_over: Collection[str] = ()
) -> tuple[SealedFile, ...]:
    """The sealed files whose bytes are to be compared.

    Those that the listing `files` does not have with their sealed size, and those
    `passed_over`, have a finding already.
    """
    sizes = {file.path: file.size for file in files if file.kind == "file"}
    return tuple(
        sealed
        for sealed in seal.files
        if sizes.get(sealed.path) == sealed.size and sealed.path not in passed_over
    )


class SealComparison(BlockDigests):
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
        super().__init__(folder, sizes, seal.algorithm)

    @property
    def proven(self) -> frozenset[str]:
        """The files that are what was sealed, to the last byte."""
        found = self.found
        return frozenset(
            sealed.path
            for sealed in self._files
            if tuple(found.get(sealed.path, ())) == tuple(sealed.digests.by_block)
        )

    def findings(self) -> Iterator[Finding]:
        """Yield a `seal.digest` for each file with a block that is not what was sealed."""
        owners = {sealed.digests.by_block: sealed.path for sealed in self._seal.files}
        found = self.found
        yield from at_most_few(
            finding
            for sealed in self._files
            if (finding := _differing(sealed, found.get(sealed.path, ()), owners)) is not None
        )


def _differing(
    sealed: SealedFile, found: Sequence[str | None], owners: Mapping[tuple[str, ...], str]
) -> Finding | None:
    expected = sealed.digests.by_block
    wrong = [n for n, digest in enumerate(found) if digest not in (None, expected[n])]
    if not wrong:
        return None
    owner = owners.get(tuple(digest or "" for digest in found))
    if owner is not None:
        what = f"it holds what was sealed as {owner}: the two files were swapped or copied"
    else:
        what = f"{_place(sealed, wrong)} not what was sealed: damaged, or of another save"
    first = wrong[0]
    return explained(
        "seal.digest",
        sealed.path,
        f"{sealed.path}: {what}",
        expected=f"{_named(sealed, first)} with digest {expected[first]}",
        found=found[first],
    )


def _place(sealed: SealedFile, wrong: Sequence[int]) -> str:
    if len(sealed.digests.by_block) == 1:
        return f"its {sealed.size:,} bytes are"
    if len(wrong) == 1:
        return f"{_named(sealed, wrong[0])} is"
    n_blocks = len(sealed.digests.by_block)
    return f"{len(wrong):,} of {n_blocks:,} blocks, the first being {_named(sealed, wrong[0])}, are"


def _named(sealed: SealedFile, block: int) -> str:
    start = block * BLOCK_BYTES
    end = min(sealed.size, start + BLOCK_BYTES)
    n_blocks = len(sealed.digests.by_block)
    return f"block {block + 1} of {n_blocks} (bytes {start:,} to {end:,})"


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
    others = (opened.beside, opened.archives_beside)
    parts = [part for part in (*opened.parts, *others) if part and part.metadata]
    checks = [
        ContentCheck(part.ranges, part.part.files, part.path, choose=_own_share(asked))
        for part in parts
    ]
    of_records = [
        run
        for part, check in zip(parts, checks, strict=True)
        for run in record_runs(part.source, check.by_file, check.report, asked.form_of)
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
                check.outcome.add(outcome)
    n_read = sum(n_bytes for _, n_bytes, _ in shares)
    as_sealed = sealed.proven if sealed else frozenset()
    found = [*sealed.findings()] if sealed else []
    found += [finding for check in checks for finding in check.findings(as_sealed)]
    for part in opened.parts:
        for held in part.safetensors:
            found += without_checksums(held.part, as_sealed)
    proven = sum((check.proven for check in checks), NOTHING_PROVEN)
    finished = all(check.whole for check in checks) and (sealed is None or sealed.whole)
    whole = finished and asked.choose is None
    if not finished:
        found.append(_not_all(proven, opened.url, "content.unfinished"))
    elif not whole:
        found.append(_not_all(proven, opened.url, "content.partial"))
    values = {
        inside(check.part_path, fqn): one
        for check in checks
        for fqn, one in check.outcome.values.items()
    }
    return ContentInspection(tuple(found), proven, n_read, whole, values)


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


def without_checksums(part: Part, sealed: Collection[str]) -> Iterator[Finding]:
    """Yield `record.unverifiable` for the safetensors files that the seal does not cover."""
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
    raise OptionError(
        "--subset",
        f"is a part of several (3/7) or of all bytes (10%), not {text!r}",
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


def best_of(kept: Kept, can_compute: Callable[[str], bool]) -> Checksum | None:
    """The checksum to be sealed of a file: of the whole, one that can be computed before others."""
    whole = [checksum for checksum in kept.checksums if checksum.whole]
    computed = [checksum for checksum in whole if can_compute(checksum.algorithm)]
    return next(iter((*computed, *whole)), None)


def as_kept(
    path: str, kept: Kept, checksum: Checksum | None, computed: str | None
) -> tuple[Stored | None, tuple[Finding, ...]]:
    """The entry of a seal for a file that the store keeps so, None where it keeps nothing.

    `computed` is what the bytes of the file come to by the algorithm of `checksum`, None
    where nobody computed it. Finds `store.contradicts` where that is another.
    """
    if checksum is None:
        known = kept.etag or kept.version
        return Stored(etag=kept.etag, version=kept.version) if known else None, ()
    compared = computed is not None
    stored = Stored(checksum.algorithm, checksum.value, compared, kept.etag, kept.version)
    if computed is None or computed == checksum.value:
        return stored, ()
    finding = explained(
        "store.contradicts",
        path,
        f"the bytes of {path} do not match the {checksum.algorithm} that the store reports: "
        "they were damaged in the store or in transit",
        expected=f"{checksum.algorithm} {computed}",
        found=f"{checksum.algorithm} {checksum.value}",
    )
    return stored, (finding,)


def check_stored(
    sealed: Sequence[SealedFile], kept: Mapping[str, Kept], url: str
) -> tuple[ByStore, tuple[Finding, ...]]:
    """Hold what the store keeps now of sealed files, by path, against what was sealed.

    `url` is the step's address. Finds `seal.digest` where a checksum differs,
    `store.rewritten` and `store.unverifiable` where there is none to compare.
    """
    same: list[SealedFile] = []
    other: list[Finding] = []
    rewritten: list[str] = []
    unproven: dict[str, list[SealedFile]] = {}
    for file in sealed:
        was, now = file.stored or Stored(), kept[file.path]
        value = _reported_now(was, now)
        if value is None and _written_again(was, now):
            rewritten.append(file.path)
        elif value is None:
            unproven.setdefault(_why_not(was, now), []).append(file)
        elif value == was.checksum:
            same.append(file)
        else:
            finding = explained(
                "seal.digest",
                file.path,
                f"the store reports a different {was.algorithm} for {file.path} than when it was "
                "sealed: the object was replaced by one with other bytes",
                expected=f"{was.algorithm} {was.checksum}",
                found=f"{was.algorithm} {value}",
            )
            other.append(finding)
    found = [*at_most_few(other)]
    if rewritten:
        was_written = f"{verb(len(rewritten), 'was', 'were')} written again"
        finding = Finding(
            "store.rewritten",
            some_of(rewritten),
            f"{counted(len(rewritten), 'sealed file')} {was_written} after the step was sealed, "
            "and no checksum of the store shows whether the bytes are the same: "
            f"{some_of(rewritten)}",
            next_command=command_line("verify", url, "--level", "content"),
        )
        found.append(finding)
    found += [_unproven(why, files, kept, url) for why, files in unproven.items()]
    n_not_compared = sum(file.stored is not None and not file.stored.compared for file in same)
    n_bytes = sum(file.size for file in same)
    return ByStore(len(sealed), len(same), n_bytes, n_not_compared), tuple(found)


def _reported_now(was: Stored, now: Kept) -> str | None:
    """The checksum that the store keeps now, by the algorithm of the sealed one."""
    values = (c.value for c in now.checksums if c.whole and c.algorithm == was.algorithm)
    return next(values, None) if was.checksum else None


def _written_again(was: Stored, now: Kept) -> bool:
    pairs = ((was.etag, now.etag), (was.version, now.version))
    return any(before and after and before != after for before, after in pairs)


def _why_not(was: Stored, now: Kept) -> str:
    if now.why_none:
        return now.why_none
    whole = sorted(checksum.algorithm for checksum in now.checksums if checksum.whole)
    if not whole:
        return "the store has only checksums of its parts"
    if not was.checksum:
        return _NOT_SEALED
    return f"the seal has its {was.algorithm}, and the store keeps {', '.join(whole)}"


_NOT_SEALED = "the seal has no checksum of the store's"


def _unproven(why: str, files: Sequence[SealedFile], kept: Mapping[str, Kept], url: str) -> Finding:
    paths = [file.path for file in files]
    unchanged = all(
        file.stored and file.stored.etag and file.stored.etag == kept[file.path].etag
        for file in files
    )
    witness = "; their ETags are unchanged" if unchanged else ""
    return Finding(
        "store.unverifiable",
        some_of(paths),
        f"no checksum of the store could be compared for {counted(len(files), 'sealed file')} "
        f"({some_of(paths)}): {why}{witness}",
        next_command=command_line("seal", url, "--replace")
        if why == _NOT_SEALED
        else command_line("verify", url, "--level", "content"),
    )


def without_seal(url: str, why: str, *, there: bool) -> Finding:
    """The finding for a step of which no seal covers all; `there` is one, but `why` it does not."""
    return Finding(
        "store.unverifiable",
        SEAL,
        f"the store's checksums could not be compared with those of a seal: {why}",
        next_command=command_line("verify", url, "--level", "content")
        if there
        else command_line("seal", url),
    )


def ask_store(
    opened: OpenStep, seal: Seal | None, findings: Sequence[Finding]
) -> tuple[ByStore | None, tuple[Finding, ...]]:
    """Compare the checksums that the store keeps with those in the step's seal.

    A file that differs from the seal by the `findings` so far is left out, and so are
    metadata files, which every inspection reads and compares. Storage errors pass
    through. Cost: one HEAD for each sealed file, and no byte.
    """
    step = opened.step
    if seal is None:
        if opened.has_seal:
            why = "its seal belongs to another save"
            return None, (without_seal(step.url, why, there=True),)
        return None, (without_seal(step.url, "the step has no seal", there=False),)
    differing = {finding.where for finding in findings if finding.code == "seal.digest"}
    asked = comparable(seal, step.files, {*seal.step.metadata, *differing})
    prefix = opened.in_store("")
    answers = opened.store.kept(prefix + file.path for file in asked)
    kept = {answer.path.removeprefix(prefix): answer for answer in answers}
    by_store, found = check_stored(asked, kept, step.url)
    if any(finding.code == "seal.partial" for finding in findings):
        why = "the seal does not list every file that the step needs"
        found = (*found, without_seal(step.url, why, there=True))
    return by_store, found
