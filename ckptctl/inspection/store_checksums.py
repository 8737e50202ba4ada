"""Compare a sealed step with the checksums that the store reports.

One HEAD for each sealed file, and no byte. The metadata are left out: every look
reads them, and compares them with the seal. What the answers mean is the question
of `checks.stored`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptctl.checks.store_checksums import check_stored, without_seal
from ckptctl.findings import ByStore, Finding
from ckptctl.formats.own.seals import SEAL, Seal, SealedFile
from ckptctl.model import Step
from ckptctl.storage.contract import Store


def ask_store(
    store: Store, step: Step, seal: Seal | None, findings: Sequence[Finding]
) -> tuple[ByStore | None, tuple[Finding, ...]]:
    """Compare the checksums that the store keeps with those in the step's seal.

    `findings` are those so far: a file of which they say that it is not what was sealed is
    not asked for. Storage errors pass through.
    """
    if seal is None:
        if any(file.path == SEAL for file in step.files):
            why = "its seal does not speak of this save"
            return None, (without_seal(step.url, why, there=True),)
        return None, (without_seal(step.url, "the step has no seal", there=False),)
    told = {finding.where for finding in findings if finding.code == "seal.digest"}
    asked = _as_listed(step, seal, told)
    prefix = f"{step.name}/"
    answers = store.kept(prefix + file.path for file in asked)
    kept = {answer.path.removeprefix(prefix): answer for answer in answers}
    by_store, found = check_stored(asked, kept, step.url)
    if any(finding.code == "seal.partial" for finding in findings):
        why = "the seal does not list every file that the step needs"
        found = (*found, without_seal(step.url, why, there=True))
    return by_store, found


def _as_listed(step: Step, seal: Seal, told: Collection[str]) -> list[SealedFile]:
    sizes = {file.path: file.size for file in step.files if file.kind == "file"}
    left_out = {path for path, _ in seal.step.metadata}.union(told)
    return [
        file
        for file in seal.files
        if file.path not in left_out and sizes.get(file.path) == file.size
    ]
