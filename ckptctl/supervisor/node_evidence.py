"""Collect the evidence of a hang on the other nodes of a SLURM job.

`ckptctl run` in a batch script sees the processes of its own node. SLURM starts this module once
on each of the others (`srun --overlap`); it finds the processes of the job there by their marker,
collects what `evidence` does on the first node, and prints it as one line. A node that does not
answer leaves its ranks unseen: then nobody is named for what they may have done.

Source: measured with Slurm 22.05: a step with `--overlap` starts beside one that has all
processors of the node, and `--nodelist` alone would still start SLURM_NTASKS tasks.
"""

# Annotations stay objects, so that reading a document evaluates no string as code.
import base64
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypedDict

import ckptctl
from ckptctl.distributed.commands import run_bounded
from ckptctl.distributed.launcher import cluster_context, expand
from ckptctl.errors import OwnFileUnreadable, StorageError
from ckptctl.formats.own.files import as_fields, parsed, typed
from ckptctl.formats.own.heartbeats import FOLDER_VARIABLE, KEY_VARIABLE
from ckptctl.starting import python_command
from ckptctl.storage.shared_places import new_private_folder, open_private_folder
from ckptctl.supervisor.evidence import RankEvidence, collect
from ckptctl.supervisor.heartbeats import beats_of_launched, read_beats
from ckptctl.supervisor.processes import MARKER, marked
from ckptctl.supervisor.slurm import ask

_MARKER_OF_JOB = "CKPTCTL_COLLECTS"
"""The marker of the job: under its own name the collector would be one of its processes."""
_BEGIN = "ckptctl-evidence "
ANSWER_S = 180.0
"""How long the nodes are waited for: what `collect` takes at most on a busy node."""
_MAX_LINE_BYTES = 16 << 20
_DEEPEST_KEPT = 48
"""How many calls of a stack are passed on, the innermost."""


class NodeDocument(TypedDict):
    """What one other node answered."""

    works: bool
    """Processes that its ranks have started are busy."""
    ranks: list[RankEvidence]
    world_size: int | None
    """The ranks of the whole job, as its ranks state it; null where none does."""


def over_slurm() -> Callable[[Mapping[str, str], NodeDocument], list[NodeDocument]] | None:
    """What collects on the other nodes of the SLURM job around this process; None without any."""
    about = cluster_context()
    nodes = expand(about.node_list or "") if about.scheduler == "slurm" else ()
    others = [node for node in nodes if node != about.node]

    def collect_on_others(variables: Mapping[str, str], _own: NodeDocument) -> list[NodeDocument]:
        slurm = ask(others)
        up = [node for node in others if slurm is None or node not in slurm.down]
        return collect_elsewhere(_by_srun(up), variables) if up else []

    return collect_on_others if others else None


def _by_srun(nodes: Sequence[str]) -> list[str]:
    """The words that start one process on each of these nodes, beside the steps of the job."""
    n = len(nodes)
    return [
        *("srun", "--overlap", f"--nodes={n}", f"--ntasks={n}", "--ntasks-per-node=1"),
        *("--no-kill", "--kill-on-bad-exit=0", "--cpu-bind=none", f"--nodelist={','.join(nodes)}"),
    ]


def collect_elsewhere(start: Sequence[str], variables: Mapping[str, str]) -> list[NodeDocument]:
    """What the nodes answer on which `start` starts processes; less where some do not answer.

    `variables` are those that the job got from `run`: its marker, and the folder and the key of
    the heartbeats. Takes up to three minutes.
    """
    names = {FOLDER_VARIABLE: FOLDER_VARIABLE, KEY_VARIABLE: KEY_VARIABLE, MARKER: _MARKER_OF_JOB}
    environment = {
        **os.environ,
        **{names[name]: variables[name] for name in names if name in variables},
        "PYTHONPATH": os.path.dirname(next(iter(ckptctl.__path__))),
    }
    words = [*start, *python_command("-m", __name__)]
    try:
        done = run_bounded(words, ANSWER_S, environment=environment)
    except OSError:
        return []
    return documents_in(done.stdout)


def line_of(document: NodeDocument) -> str:
    """The line that a node prints, with the innermost calls of each stack."""
    ranks = [
        replace(rank, stack=None if rank.stack is None else rank.stack[:_DEEPEST_KEPT])
        for rank in document["ranks"]
    ]
    data = zlib.compress(json.dumps({**document, "ranks": ranks}, default=as_fields).encode())
    return f"{_BEGIN}{base64.b64encode(data).decode()}\n"


def documents_in(text: str) -> list[NodeDocument]:
    """The answers among the lines that nodes printed."""
    lines = (line.partition(_BEGIN)[2] for line in text.splitlines())
    return [*filter(None, map(_document_in, filter(None, lines)))]


def _document_in(line: str) -> NodeDocument | None:
    """The answer of a node; None for a line that is none."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(line), _MAX_LINE_BYTES)
        return typed(NodeDocument, parsed(data, _MAX_LINE_BYTES))
    except (ValueError, zlib.error, OwnFileUnreadable):
        return None


def main() -> None:
    """Print what is found on this node of the job that the environment names."""
    find = partial(marked, os.environ.pop(_MARKER_OF_JOB, ""))
    path, key = os.environ.pop(FOLDER_VARIABLE, ""), os.environ.pop(KEY_VARIABLE, "")
    folder = None
    with suppress(OSError, StorageError):
        folder = open_private_folder(path) if path else None
    reported = {} if folder is None else read_beats(folder, key, {})
    beats = {**beats_of_launched(find()), **reported}
    out = new_private_folder("ckptctl-node-evidence-")
    try:
        found = collect(beats, find, folder, out, time.time())
    finally:
        out.remove()
    sizes = (beat["world_size"] for beat in beats.values())
    document = NodeDocument(
        works=found.works,
        ranks=[*found.ranks],
        world_size=max((size for size in sizes if size is not None), default=None),
    )
    sys.stdout.write(line_of(document))


if __name__ == "__main__":
    main()
