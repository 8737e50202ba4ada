"""Compare what an object store keeps of the files of a step with its seal.

No byte is read: equal checksums prove that an object was not replaced by one with other bytes
since it was sealed, not what its disks return today. ETags and versions show that an object was
written again, and not with which bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckptctl.findings import ByStore, Finding, explained
from ckptctl.formats.own.seals import SEAL, Seal, SealedFile, Stored
from ckptctl.formatting import at_most_few, command_line, counted, some_of, verb
from ckptctl.inspection.seals import comparable
from ckptctl.model import Checksum, Kept

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenStep


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
        value = _comparable(was, now)
        if value is None and _written_again(was, now):
            rewritten.append(file.path)
        elif value is None:
            unproven.setdefault(_why_not(was, now), []).append(file)
        elif value == was.checksum:
            same.append(file)
        else:
            other.append(_replaced(file.path, was, value))
    found = [*at_most_few(other)]
    if rewritten:
        found.append(_rewritten(rewritten, url))
    found += [_unproven(why, files, kept, url) for why, files in unproven.items()]
    n_not_compared = sum(file.stored is not None and not file.stored.compared for file in same)
    return ByStore(len(sealed), len(same), sum(file.size for file in same), n_not_compared), tuple(
        found
    )


def _comparable(was: Stored, now: Kept) -> str | None:
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


def _replaced(path: str, was: Stored, value: str) -> Finding:
    return explained(
        "seal.digest",
        path,
        f"the store reports a different {was.algorithm} for {path} than when it was sealed: "
        "the object was replaced by one with other bytes",
        expected=f"{was.algorithm} {was.checksum}",
        found=f"{was.algorithm} {value}",
    )


def _rewritten(paths: Sequence[str], url: str) -> Finding:
    return Finding(
        "store.rewritten",
        some_of(paths),
        f"{counted(len(paths), 'sealed file')} {verb(len(paths), 'was', 'were')} written "
        "again after the step was sealed, and no checksum of the store shows whether the "
        f"bytes are the same: {some_of(paths)}",
        next_command=command_line("verify", url, "--level", "content"),
    )


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
