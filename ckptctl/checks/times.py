"""Check the write times of shard files against the metadata that names them.

A save writes its metadata last. Where some shards are much younger, a later save
began to write over the step and did not come to its end: the old metadata fits the
new shards, and every record is sound. Times can be lost in a copy, so it is a
suspicion and no more; what proves that files belong together is a seal.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator

from ckptctl.findings import Finding
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formatting import counted, inside, some_of
from ckptctl.model import Part, Step

QUIET_S = 600.0
"""So long nothing is written between the end of a save and the next one over it.

A copy without times leaves less between two files, and where it begins with the
metadata, all shards are younger.
"""


def check_times(step: Step, part: Part, named: Collection[str]) -> Iterator[Finding]:
    """Yield one `shard.newer` for shards that a later save has left among older ones.

    `named` are the shard files that the metadata names. Nothing is said where the
    storage keeps no times, or where all shards are younger alike.
    """
    times = {file.path: file.mtime_s for file in part.files if file.mtime_s is not None}
    written_s = times.get(METADATA)
    if written_s is None:
        return
    later = {path: times[path] - written_s for path in sorted(named) if path in times}
    newer = [path for path, after_s in later.items() if after_s >= QUIET_S]
    if not newer or len(newer) == len(later):
        return
    minutes = min(later[path] for path in newer) / 60
    where = [inside(part.path, path) for path in newer]
    yield Finding(
        "shard.newer",
        where[0],
        f"{some_of(where)} {('was' if len(newer) == 1 else 'were')} written {minutes:,.0f} "
        "minutes or more after the metadata, "
        f"{counted(len(later) - len(newer), 'other shard file')} before it: a later save over "
        "this step was interrupted, or a copy lost the modification times",
        expected="metadata written last",
        found=f"{counted(len(newer), 'shard file')} {minutes:,.0f} minutes younger",
        next_command=shlex.join(["ckptctl", "verify", step.url, "--level", "structure"]),
    )
