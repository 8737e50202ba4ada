"""Of the causes that several nodes found in their own logs the one that explains the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl import classify
from ckptctl.failures.classifying import most_decisive
from ckptctl.failures.results import Classification

LOST_PEER = (
    "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:9449. This is typically caused by a remote worker crashing.\n"
)
RAISED = (
    '[rank3]:   File "train.py", line 9, in train\n[rank3]: ZeroDivisionError: division by zero\n'
)
XID = "node002 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"


def cause(folder: Path, node: str, text: str) -> Classification:
    """The cause on a node, as its agent names its logs."""
    path = folder / f"{node}.log"
    path.write_text(text)
    found = classify(str(path), exit_code=1)
    assert found.evidence or found.consequences
    return found


@pytest.mark.parametrize("decisive", [RAISED, XID])
@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_lost_its_peer_does_not_explain_the_failure(tmp_path, decisive, first):
    victim = cause(tmp_path, "node-1", LOST_PEER)
    failed = cause(tmp_path, "node-2", decisive)
    both = [failed, victim] if first else [victim, failed]
    assert most_decisive(both) is failed


def test_without_any_evidence_the_first_node_decides(tmp_path):
    unknown = Classification.stated("unknown", "nothing was read")
    assert most_decisive([unknown]) is unknown
    failed = cause(tmp_path, "node-2", RAISED)
    assert most_decisive([unknown, failed]) is failed
    assert most_decisive([unknown, replace(unknown, message="other")]) is unknown
