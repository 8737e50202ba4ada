"""Resolve the step for a script that loads it itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ckptctl.distributed.process_group import JOB_TIMEOUT_S, make_group
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.tiers import roots_in
from ckptctl.storage.opening import SharedStores
from ckptctl.train.agreement import SETTLE_S, Selection, decide, prove_content, prove_seen, too_many

if TYPE_CHECKING:
    from typing_extensions import Unpack


def resolve(
    resume_from: str | int | None,
    root: str | Sequence[str],
    *,
    optional_roots: Collection[str] = (),
    settle_s: float = SETTLE_S,
    patience_s: float = JOB_TIMEOUT_S,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> str | None:
    """The path of the step to resume from, the same on every rank; None for a fresh run.

    With several roots the step is that of `pick ROOT...`; `optional_roots` may be absent.
    `resume_from` is `auto` (the newest usable step under `root`), `none`, a step number, or
    the path of a step, which must be usable. Every rank of the job calls this; without a
    process group the answer is that of one process. Nothing is written.

    Raises `NothingToResume` if steps exist but none is usable (`exit_code` 11) or one could
    not be inspected (75), `StorageError` if the root could not be inspected or a rank sees
    another storage than rank 0 (`settle_s` seconds after the first attempt). The answer is
    a fresh run only if that is certain.

    With level `content` all ranks share the bytes, and steps that fail are skipped. Each
    field of the three options objects is also a keyword of this function.

    Cost: that of `pick` on rank 0, one read of the metadata on every other rank.
    """
    group = make_group(patience_s)
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    shared = SharedStores.of(storage)
    selection = Selection(roots_in(root, optional_roots), policy, requirements, shared, settle_s)

    failed: list[int] = []
    while True:
        decision = group.from_first(lambda: decide(resume_from, selection, skip=tuple(failed))[0])
        prove_seen(decision, group, selection)
        if decision.step is None or prove_content(decision, group, selection) is None:
            return decision.path
        failed.append(decision.step)
        if len(failed) > policy.max_fallback:
            raise too_many(failed, selection.roots)
