"""Read the resume report that `ckptctl.train` leaves of each resume.

The reports lie in the checkpoint root, under `.ckptctl/attempts`. A report names the
checkpoint that was loaded.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.errors import PathNotFound, UsageError
from ckptctl.formats.bounded_json import NotJson, read_json
from ckptctl.formats.layouts import OWN_FOLDER
from ckptctl.loss.resumes import Boundary
from ckptctl.storage.opening import base_name, join_url, open_store, parent_url

SCHEMA = "ckptctl.resume/1"
_ATTEMPTS = "attempts"
_SUFFIX = ".resume.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What a report says of a resume: the root and step that were loaded, and where it lies.

    `boundary` is None where the job began fresh.
    """

    url: str
    root: str | None
    path: str | None
    boundary: Boundary | None


def read_resume_report(
    place: str,
    *,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> ResumeReport:
    """The report at `place`: its file, or the newest one of a checkpoint root.

    Raises `UsageError` where there is none, or where the file is no report.
    """
    options = {"storage_options": storage_options, "endpoint_url": endpoint_url}
    if base_name(place).endswith(".json"):
        folder, attempts, names = parent_url(place), "", [base_name(place)]
    else:
        folder, names = place, []
        attempts = _ATTEMPTS if base_name(place) == OWN_FOLDER else f"{OWN_FOLDER}/{_ATTEMPTS}"
    with open_store(folder, timeout_s=timeout_s, **options) as store:  # type: ignore[arg-type]
        try:
            if not names:
                listed = (entry.path.rpartition("/")[2] for entry in store.list_dir(attempts))
                names = sorted(name for name in listed if name.endswith(_SUFFIX))[-1:]
            if not names:
                raise PathNotFound(folder)
            path = f"{attempts}/{names[0]}" if attempts else names[0]
            url = join_url(folder, path)
            return _parsed(url, read_json(store, path, max_bytes=_MAX_BYTES))
        except NotJson as error:
            raise UsageError(f"{url}: this is no report of a resume: {error}") from error
        except PathNotFound as error:
            raise UsageError(
                f"{place}: there is no report of a resume; name the checkpoint's step with "
                "--resume-step"
            ) from error


def _parsed(url: str, report: object) -> ResumeReport:
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise UsageError(f"{url}: this is no report of a resume ({SCHEMA})")
    step = report.get("step")
    root, path = report.get("root"), report.get("path")
    boundary = None
    if isinstance(step, int):
        tokens, samples = (
            count if isinstance(count, int) else None
            for count in (report.get("tokens"), report.get("samples"))
        )
        boundary = Boundary(step, "report", tokens, samples, _seconds(report.get("at")))
    return ResumeReport(
        url=url,
        root=root if isinstance(root, str) else None,
        path=path if isinstance(path, str) else None,
        boundary=boundary,
    )


def _seconds(at: object) -> float | None:
    """A time as RFC 3339 has it, in seconds since 1970; None for anything else."""
    try:
        # Python 3.10 does not know the Z.
        moment = datetime.datetime.fromisoformat(str(at).replace("Z", "+00:00"))
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()
