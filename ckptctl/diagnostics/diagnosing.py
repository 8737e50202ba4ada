"""Find known mistakes in a job script, an environment or a storage."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from ckptctl.diagnostics.environment import check_environment
from ckptctl.diagnostics.results import Diagnosis, diagnosis
from ckptctl.diagnostics.slurm_checks import check_script
from ckptctl.diagnostics.slurm_script import read_script
from ckptctl.diagnostics.storage_traits import check_storage
from ckptctl.errors import UsageError
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.storage.log_lines import read_text
from ckptctl.storage.opening import absolute_url

if TYPE_CHECKING:
    from typing_extensions import Unpack


SUBJECTS = ("slurm", "env", "storage")
_MAX_SCRIPT = 1 << 20


def doctor(
    what: str,
    target: str | None = None,
    *,
    known_variables: frozenset[str] = frozenset(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Diagnosis:
    """Diagnose `what`: `slurm` with a job script, `env`, or `storage` with a root.

    A script is read, not run. The environment is that of this process; variables that begin
    with `CKPTCTL_` and are not in `known_variables`, if given, are reported as misspelt.
    For a storage, small files are written to a folder under the root's `.ckptctl/` and
    removed.

    Raises `UsageError` for another subject or a wrong number of targets, and
    `StorageError`.
    """
    if what not in SUBJECTS:
        raise UsageError(
            f"doctor diagnoses {', '.join(SUBJECTS)}, not {what!r}",
            next_command="ckptctl doctor env",
        )
    if (what == "env") != (target is None):
        needs = "takes no more arguments" if what == "env" else "needs one more argument"
        example = {"env": "", "slurm": " JOB.sh", "storage": " ROOT"}[what]
        raise UsageError(f"doctor {what} {needs}", next_command=f"ckptctl doctor {what}{example}")
    if target is None:
        known = known_variables or frozenset(os.environ)
        advice, facts = check_environment(os.environ, known)
        return diagnosis(what, "this process", advice, facts)
    if what == "slurm":
        script = read_script(read_text(target, limit=_MAX_SCRIPT))
        found = check_script(os.path.basename(target), script)
        n_trainings = str(len(script.trainings))
        return diagnosis(what, target, found, (("commands that train", n_trainings),))
    storage = options_from(keywords, storage)
    advice, facts = check_storage(target, storage)
    following = f"ckptctl scan {shlex.quote(absolute_url(target))}"
    return diagnosis(what, target, advice, facts, following)
