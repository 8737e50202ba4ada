"""Answers of the library, put together by hand, to see how they are shown."""

from __future__ import annotations

from dataclasses import replace

from ckptctl.findings import Claim, ClaimName, Finding, Report, Verdict, in_order, verdict_of
from ckptctl.model import STATE_KINDS, Level, StatePart, TrainState, WorldSize
from ckptctl.selection.choosing import Answer, PassedOver
from ckptctl.selection.picking import Pick, Scan
from ckptctl.selection.verifying import Contents, ShardRow, TensorRow

NOW_S = 1_800_000_000.0
ROOT = "/ckpt/run"


def state(*kinds: str) -> TrainState:
    """Train state that holds `kinds`."""
    return TrainState(**{kind: StatePart(kind in kinds) for kind in STATE_KINDS})


ALL_STATE = state(*STATE_KINDS)


def report(step: int, *findings: Finding, n_ranks: int = 8, **changes: object) -> Report:
    """A report on `step_{step}` that bears the verdict of its findings."""
    verdict = verdict_of(findings)
    made = Report(
        url=f"{ROOT}/step_{step}",
        number=step,
        layout="dcp",
        verdict=verdict,
        exit_code=verdict.exit_code,
        level=Level.LISTING,
        findings=in_order(findings),
        state=ALL_STATE,
        world_size=WorldSize(n_ranks, "shard-files"),
        n_bytes=1_288_490_188,
        n_files=n_ranks + 1,
        n_tensors=12,
        n_records=96,
        bytes_read=4096,
        written_s=NOW_S - 3 * 3600,
        parts=("",),
        digests=((".metadata", "ab" * 32),),
        ranks=(("", tuple(range(n_ranks))),),
    )
    made = replace(made, **changes)
    unread = made.bytes_proven < made.bytes_in_records or made.level is not Level.CONTENT
    return replace(made, claims=tuple(_claim(name, unread) for name in ClaimName))


def _claim(name: ClaimName, unread: bool) -> Claim:
    """Everything is proven, but of a step that was not read its bytes."""
    if name is ClaimName.BYTES and unread:
        return Claim.unknown(name, "checked: listing")
    return Claim.proven(name, "metadata")


def short(rank: int) -> Finding:
    """A shard file that ends too early."""
    return Finding(
        "shard.truncated",
        f"__{rank}_0.distcp",
        "4,096 of 10,240 bytes exist; 12 chunks in 9 tensors cannot be read",
        expected="10,240 bytes",
        found="4,096 bytes",
    )


NO_METADATA = Finding("metadata.missing", ".metadata", ".metadata is missing beside 8 shard files")


def scan(*reports: Report, chosen: int | None = None, **changes: object) -> Scan:
    """A scan that found `reports`, newest first."""
    made = Scan(
        root=ROOT,
        exists=True,
        reports=reports,
        pick=pick(next((one for one in reports if one.number == chosen), None)),
        findings=(),
        n_steps=len(reports),
        next_command=None if chosen is None else f"ckptctl pick {ROOT}",
    )
    return replace(made, **changes)


def pick(chosen: Report | None, *passed_over: tuple[Report, str], **changes: object) -> Pick:
    """A choice of `chosen`, after `passed_over` with the reasons."""
    found = Answer.FELL_BACK if passed_over else Answer.FOUND
    made = Pick(
        answer=found if chosen else Answer.NONE_USABLE,
        roots=(ROOT,),
        chosen=chosen,
        passed_over=tuple(PassedOver(*over) for over in passed_over),
        findings=(),
        level=chosen.level if chosen else None,
        level_reason="the bytes themselves were not read" if chosen else None,
        message=f"resume from step {chosen.number}" if chosen else "none is usable",
        exit_code=0 if chosen else 11,
        next_command=None if chosen else f"ckptctl scan {ROOT}",
    )
    return replace(made, **changes)


def contents(*tensors: TensorRow, **changes: object) -> Contents:
    """What is in a step of `tensors`."""
    made = Contents(
        url=f"{ROOT}/step_1200",
        number=1200,
        layout="dcp",
        exit_code=0,
        tensors=tensors,
        bytes_entries=("step",),
        shards=(ShardRow("__0_0.distcp", 0, 4096, 3), ShardRow("__1_0.distcp", 1, 2048, 2)),
        state=ALL_STATE,
        world_size=WorldSize(2, "shard-files"),
        n_params=1000,
        n_bytes=6144,
        bytes_by_kind=(("model", 4096),),
        checkpoint_id=None,
        save_id=None,
        torch_version="2.9 or newer",
        findings=(),
        next_command=None,
    )
    return replace(made, **changes)


VERDICTS = {
    Verdict.CORRUPT: Finding("record.framing", "__0_0.distcp", "1 record is not well-formed"),
    Verdict.UNSAFE: Finding("metadata.unsafe", ".metadata", "it asks for os.system"),
    Verdict.UNKNOWN: Finding("step.unknown", "step_1", "no answer after 4 tries"),
    Verdict.CHANGED: Finding("step.changed", "step_1", "__0_0.distcp changed"),
    Verdict.IN_PROGRESS: Finding("step.in-progress", ".metadata", "the last write was 9 s ago"),
    Verdict.UNVERIFIABLE: Finding("format.unsupported", "", "this is a DeepSpeed checkpoint"),
    Verdict.INCOMPLETE: NO_METADATA,
}
"""A finding for each verdict that a finding can force."""
