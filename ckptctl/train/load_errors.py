"""The errors of a load: a damaged record, and a file that is missing, truncated or outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ckptctl.errors import StepDamaged
from ckptctl.findings import Finding, Severity
from ckptctl.formats.archive.directory import Member
from ckptctl.formatting import command_line
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.presence import (
    check_presence,
    check_sizes,
    escape_reason,
    holds_safetensors,
)
from ckptctl.inspection.structure import SAYS
from ckptctl.records.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Damage:
    """Errors about the records of one part, whose `ranges` are those of its metadata."""

    opened: OpenStep
    ranges: Ranges

    def record(self, number: int, code: str, reason: str) -> StepDamaged:
        """The error for a damaged record, that of range `number`."""
        ranges = self.ranges
        if code == "record.framing" and holds_safetensors(ranges):
            return self.finding(next(check_sizes(ranges)))
        start = ranges.starts[number]
        message = (
            f"the record of {ranges.owner(number).name}, bytes {start:,} to "
            f"{start + ranges.lengths[number]:,}, {SAYS[code][0]}: {reason}"
        )
        return self.finding(Finding(code, self._file(number), message))

    def wrong_crc(self, number: int, member: Member) -> Callable[[int], None]:
        """A callback for a member whose bytes do not match the saved checksum."""

        def wrong(found: int) -> None:
            reason = f"{member.name} has CRC-32 {found:08x}, but {member.crc:08x} was saved"
            raise self.record(number, "record.crc", reason)

        return wrong

    def check_paths(self, numbers: Iterable[int]) -> None:
        """Raise `StepDamaged` if the file of a record lies outside the step."""
        for name in {self._file(number) for number in numbers}:
            reason = escape_reason(name)
            if reason is not None:
                message = f"the path {reason}, and was not followed"
                raise self.finding(Finding("path.escape", name, message))

    def missing(self, error: Exception, numbers: Iterable[int]) -> StepDamaged:
        """The error for a file that is missing, truncated or a link. Cost: one listing."""
        needed = {self._file(number) for number in numbers}
        # List again: the state after the failed read matters.
        for finding in check_presence(self.ranges, self.opened.list_again()):
            if finding.severity is Severity.FAULT and finding.where in needed:
                return self.finding(finding)
        message = (
            f"it changed while it was loaded ({error}): another process writes or deletes there"
        )
        return self.finding(Finding("step.changed", "", message))

    def finding(self, finding: Finding) -> StepDamaged:
        """A finding as an error, with the command that inspects the whole step."""
        url = self.opened.url
        command = command_line("verify", url, "--level", "content")
        return StepDamaged(url, replace(finding, next_command=command))

    def _file(self, number: int) -> str:
        return self.ranges.file_names[self.ranges.files[number]]
