"""Check that every byte of every record is what was saved.

Each member of a record carries a CRC-32, which torch writes and never compares.
`records.content_runs` reads and verifies the records; this module chooses them and turns
the results into findings. `structure` compares a record with its metadata; `sealed_bytes`
detects correct bytes that belong to another step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ckptctl.data_classes import dataclass
from ckptctl.findings import Finding, Proven
from ckptctl.formatting import at_most_few, counted, inside, some_of, verb
from ckptctl.inspection.structure import SAYS, readable_ranges
from ckptctl.model import FileInfo
from ckptctl.records.not_finite import Values
from ckptctl.records.opening import ZSTD
from ckptctl.records.ranges import Ranges
from ckptctl.records.verification import NO_ZSTD, Checked

Choose = Callable[[Sequence[int]], Collection[int]]
"""Which of the things whose lengths in bytes are given, in order, are to be read; by place."""


@dataclass(frozen=True, slots=True)
class RecordResults:
    """The results of the records of a part in one process, which another adds to its own.

    Records are numbers in the ranges of the part, which are the same in both as long as
    both read the same metadata.
    """

    n_chosen: int
    sound: tuple[int, ...]
    wrong: tuple[tuple[int, str, Checked], ...]
    unverifiable: tuple[tuple[str, tuple[int, ...]], ...]
    folds: tuple[tuple[int, tuple[int, int]], ...]
    values: tuple[tuple[str, Values], ...] = ()


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
        self._part_path = part_path
        self._sound: list[int] = []
        self._wrong: dict[tuple[int, str], dict[int, Checked]] = defaultdict(dict)
        self._unverifiable: dict[str, list[int]] = defaultdict(list)
        self._folds: dict[int, tuple[int, int]] = {}
        self._values: dict[str, Values] = {}
        by_file = [
            sorted(filter(self._can_read, numbers), key=ranges.starts.__getitem__)
            for numbers in readable_ranges(ranges, files)
        ]
        self.n_asked = sum(ranges.lengths[number] for numbers in by_file for number in numbers)
        self.by_file = by_file if choose is None else _chosen(ranges, by_file, choose)
        self._n_chosen = sum(map(len, self.by_file))

    @property
    def whole(self) -> bool:
        """Every record that was chosen has been read."""
        n_wrong = sum(map(len, self._wrong.values()))
        n_unproven = sum(map(len, self._unverifiable.values()))
        return len(self._sound) + n_wrong + n_unproven == self._n_chosen

    @property
    def proven(self) -> Proven:
        """How much has been proven so far."""
        n_bytes = sum(self.ranges.lengths[number] for number in self._sound)
        n_values = sum(values.n_values for values in self._values.values())
        return Proven(self.n_asked, n_bytes, len(self._sound), n_values)

    @property
    def outcome(self) -> RecordResults:
        """The results of the records so far."""
        wrong = tuple(
            (number, code, checked)
            for (_, code), alike in self._wrong.items()
            for number, checked in alike.items()
        )
        unverifiable = tuple((why, tuple(numbers)) for why, numbers in self._unverifiable.items())
        sound, folds = tuple(self._sound), tuple(self._folds.items())
        values = tuple(self._values.items())
        return RecordResults(self._n_chosen, sound, wrong, unverifiable, folds, values)

    def add(self, other: RecordResults) -> None:
        """Add the results of other records of the part, from another process."""
        self._n_chosen += other.n_chosen
        self._sound += other.sound
        self._folds |= dict(other.folds)
        for number, code, checked in other.wrong:
            self._note(number, code, checked)
        for why, numbers in other.unverifiable:
            self._unverifiable[why] += numbers
        for fqn, values in other.values:
            self._add_values(fqn, values)

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
            self._finding(file, code, self._wrong[file, code]) for file, code in sorted(self._wrong)
        )
        yield from self._without_proof(sealed)
        yield from at_most_few(
            self._not_finite(fqn, values)
            for fqn, values in sorted(self._values.items())
            if not values.finite
        )

    def _can_read(self, number: int) -> bool:
        # For those that went through something else, `structure` has a finding.
        return self.ranges.owner(number).transforms in ((), (ZSTD,))

    def report(self, number: int, checked: Checked) -> None:
        """Take the result of a record; see `records.content_runs.Report`."""
        if checked.values is not None:
            self._add_values(self.ranges.owner(number).entry.fqn, checked.values)
        if checked.wrong is not None:
            self._note(number, "record.crc", checked)
        elif checked.unreadable is not None:
            self._note(number, checked.unfit or "record.framing", checked)
        elif checked.unproven is not None:
            self._unverifiable[checked.unproven].append(number)
        else:
            self._sound.append(number)
            if checked.folds is not None:
                self._folds[number] = checked.folds

    def _note(self, number: int, code: str, checked: Checked) -> None:
        self._wrong[self.ranges.files[number], code][number] = checked

    def _add_values(self, fqn: str, values: Values) -> None:
        self._values[fqn] = self._values.get(fqn, Values()) + values

    def _compare_folds(self) -> None:
        """Checksums against `serialization_id`, which torch makes of them.

        How it does so is no promise: where no record of the part bears it out, a torch
        that does it in another way wrote them, and there is no finding.
        """
        folds, self._folds = self._folds, {}
        differing = [number for number, (saved, found) in folds.items() if saved != found]
        if len(differing) == len(folds):
            return
        for number in differing:
            self._sound.remove(number)
            reason = "its checksums are not those that its serialization_id was made from"
            self._note(number, "record.crc", Checked(unreadable=reason))

    # Words

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
        return Finding(code, inside(self._part_path, path), message, expected, found)

    def _without_proof(self, sealed: Collection[str]) -> Iterator[Finding]:
        counts = []
        files: set[str] = set()
        for why, numbers in self._unverifiable.items():
            open_ = {
                number: path
                for number in numbers
                if (path := self._path_in_step(number)) not in sealed
            }
            files.update(open_.values())
            if open_:
                counts.append(f"{counted(len(open_), 'record')} {why}")
        if counts:
            yield unverifiable(
                self._part_path, f"{'; '.join(counts)} ({some_of(sorted(files))})", self._hint
            )

    def _not_finite(self, fqn: str, values: Values) -> Finding:
        n_nan, n_infinite = values.n_nan, values.n_infinite
        counts = [f"{n_nan:,} {verb(n_nan, 'is', 'are')} NaN"] if n_nan else []
        if n_infinite:
            counts.append(f"{n_infinite:,} {verb(n_infinite, 'is', 'are')} infinite")
        least = "at least " if values.more else ""
        return Finding(
            "values.not-finite",
            inside(self._part_path, fqn),
            f"of {counted(values.n_values, 'value')} scanned, {least}{' and '.join(counts)}: "
            "the tensor was saved with them",
            expected="finite values",
            found=f"{least}{n_nan:,} NaN, {n_infinite:,} infinite",
            next_command="ckptctl explain values.not-finite",
        )

    @property
    def _hint(self) -> str | None:
        return "pip install 'ckptctl[zstd]'" if NO_ZSTD in self._unverifiable else None

    def _path_in_step(self, number: int) -> str:
        return inside(self._part_path, self.ranges.file_names[self.ranges.files[number]])


def unverifiable(part_path: str, what: str, next_command: str | None = None) -> Finding:
    """The finding for bytes that nothing in the step can prove."""
    return Finding(
        "record.unverifiable",
        part_path,
        f"{what}; no seal covers them",
        expected="a checksum for every byte, or a seal",
        found="neither",
        next_command=next_command or "ckptctl explain record.unverifiable",
    )


def _chosen(ranges: Ranges, by_file: Iterable[Sequence[int]], choose: Choose) -> list[list[int]]:
    files = list(by_file)
    in_order = [number for numbers in files for number in numbers]
    taken = choose([ranges.lengths[number] for number in in_order])
    chosen = {in_order[place] for place in taken}
    return [[number for number in numbers if number in chosen] for numbers in files]
