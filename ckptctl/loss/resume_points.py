"""Determine the checkpoint that a job resumed from, as the caller or a resume report names it.

`ckptctl.train` writes one report for each resume into the checkpoint root, under
`.ckptctl/attempts`. Where neither names a checkpoint, `resumes` finds it in the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptctl.errors import OwnFileUnreadable, PathNotFound, UsageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own import ledger as own
from ckptctl.formatting import seconds_of
from ckptctl.loss.resumes import ResumePoint
from ckptctl.options import StorageOptions
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, join_url, open_store, parent_url

_ATTEMPTS = "attempts"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The content of a resume report: the root and the path of the step that was loaded."""

    url: str
    """Its path or URL."""
    root: str | None
    """The checkpoint root."""
    path: str | None
    """The step that was loaded."""
    resume_point: ResumePoint | None
    """The checkpoint that was resumed from."""


@dataclass(frozen=True, slots=True)
class NamedCheckpoint:
    """The checkpoint as the caller names it: by its step, by a resume report, or not at all.

    `tokens` and `samples` are the counts at `step`. `report` is a report, or the
    checkpoint root that holds it. `world_size` and `saved_world_size` are the ranks that
    resumed, and that saved it. Raises `UsageError` for counts without a step.
    """

    step: int | None = None
    tokens: int | None = None
    samples: int | None = None
    report: str | None = None
    world_size: int | None = None
    saved_world_size: int | None = None

    def __post_init__(self) -> None:
        if self.step is None and (self.tokens is not None or self.samples is not None):
            raise UsageError(
                "resume_tokens and resume_samples need resume_step: they are counts at that step"
            )

    def resolve(self, storage: StorageOptions) -> tuple[ResumePoint | None, ResumeReport | None]:
        """The checkpoint, and the report where one was named.

        `step` outweighs the report, whose counts and time apply to its own step only.
        Raises `UsageError` where the report does not exist or records a fresh start. Where
        `step` is given, a root may be without a report: not every job writes one.
        """
        report = None
        if self.report is not None:
            report = read_resume_report(self.report, storage, or_none=self.step is not None)
        reported = None if report is None else report.resume_point
        if self.step is None:
            if report is not None and reported is None:
                raise UsageError(
                    f"{report.url}: the report records a fresh start; there is no resume to check"
                )
            return reported, report
        if reported is None or reported.step != self.step:
            reported = ResumePoint(self.step, "asked")
        names = ("tokens", "samples", "world_size", "saved_world_size")
        given = {name: each for name in names if (each := getattr(self, name)) is not None}
        return replace(reported, source="asked", **given), report


def read_resume_report(
    path: str, storage: StorageOptions, *, or_none: bool = False
) -> ResumeReport | None:
    """The report at `path`, which is its file or a checkpoint root: then the newest one.

    None, with `or_none`, for a root without reports, and for one whose newest report is
    damaged. Raises `UsageError` where there is none otherwise, and where the file is not a
    resume report.
    """
    if base_name(path).endswith(".json"):
        folder, attempts, names = parent_url(path), "", [base_name(path)]
    else:
        folder, names = path, []
        attempts = _ATTEMPTS if base_name(path) == OWN_FOLDER else f"{OWN_FOLDER}/{_ATTEMPTS}"
    with open_store(folder, storage) as store:
        try:
            names = names or _newest_in(store, attempts)
            if not names and or_none:
                store.list_dir()  # a root that does not exist is still an error
                return None
            if not names:
                raise PathNotFound(folder)
            file = f"{attempts}/{names[0]}" if attempts else names[0]
            url = join_url(folder, file)
            return _parsed(url, own.read_report(store, file))
        except OwnFileUnreadable as error:
            if or_none and attempts:
                return None
            raise UsageError(f"{url}: not a resume report: {error.message}") from error
        except PathNotFound as error:
            raise UsageError(
                f"{path}: no resume report found; name the step of the checkpoint with "
                "--resume-step"
            ) from error


def _newest_in(store: Store, attempts: str) -> list[str]:
    """The name of the newest report in a folder; none where there is none, or no folder."""
    try:
        listed = [entry.path.rpartition("/")[2] for entry in store.list_dir(attempts)]
    except PathNotFound:
        return []
    return sorted(name for name in listed if name.endswith(own.REPORT_SUFFIX))[-1:]


def _parsed(url: str, report: own.ResumeReport) -> ResumeReport:
    if report.schema != own.REPORT_SCHEMA:
        raise UsageError(f"{url}: not a resume report (schema {own.REPORT_SCHEMA})")
    resume_point = None
    if report.step is not None:
        resume_point = ResumePoint(
            report.step,
            "report",
            report.tokens,
            report.samples,
            seconds_of(report.at or ""),
            report.world_size,
            report.saved_world_size,
        )
    return ResumeReport(url, report.root, report.path, resume_point)
