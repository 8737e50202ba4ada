"""Resolve the step for a script that loads by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ckptctl.distributed.process_group import JOB_TIMEOUT_S, make_group
from ckptctl.model import Level
from ckptctl.options import known_level
from ckptctl.selection.tiers import roots_in
from ckptctl.train.agreement import SETTLE_S, Looking, decide, prove_content, prove_seen, too_many


def resolve(
    resume_from: str | int | None,
    root: str | Sequence[str],
    *,
    optional_roots: Collection[str] = (),
    level: Level | str | None = None,
    require: Collection[str] = (),
    max_fallback: int = 2,
    allow_missing_state: bool = False,
    pattern: str | None = None,
    grace_s: float = 600.0,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
    settle_s: float = SETTLE_S,
    patience_s: float = JOB_TIMEOUT_S,
) -> str | None:
    """The path of the step to resume from, the same on every rank; None for a fresh run.

    With several roots the step is that of `pick ROOT...`; `optional_roots` may be absent.
    `resume_from` is `auto` (the newest usable step under `root`), `none`, a step number, or
    the path of a step, which must be usable. Every rank of the job calls this; without a
    process group the answer is that of one process. Nothing is written.

    Raises `NothingToResume` where steps are there and none is usable (`exit_code` 11) or
    where one could not be looked at (75), `StorageError` where the root could not be, or
    where a rank sees another storage than rank 0 (`settle_s` seconds after the first try).
    A run is never called fresh where that is not certain.

    With level `content` all ranks share the bytes, and steps that fail are passed over.

    Cost: that of `pick` on rank 0, one read of the metadata on every other rank.
    """
    group = make_group(patience_s)
    looking = Looking(
        roots_in(root, optional_roots),
        level=known_level(level),
        require=require,
        max_fallback=max_fallback,
        allow_missing_state=allow_missing_state,
        pattern=pattern,
        grace_s=grace_s,
        storage_options=storage_options,
        endpoint_url=endpoint_url,
        timeout_s=timeout_s,
        settle_s=settle_s,
    )

    failed: list[int] = []
    while True:
        decision = group.from_first(lambda: decide(resume_from, looking, skip=tuple(failed)))
        prove_seen(decision, group, looking)
        if decision.step is None or prove_content(decision, group, looking) is None:
            return decision.path
        failed.append(decision.step)
        if len(failed) > max_fallback:
            raise too_many(failed, looking.roots)
