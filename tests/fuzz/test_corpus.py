"""Every input that a fuzzer found worth keeping is read or refused, and causes nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus.tar.xz"

REPLAY = """
import sys, tarfile
from collections import Counter
from targets import TARGETS, Watch

watch, read = Watch(), Counter()
with tarfile.open(sys.argv[1]) as tar:
    for member in tar:
        name = member.name.split("/")[0]
        read[name, watch.feed(name, tar.extractfile(member).read())] += 1
for (name, was_read), n in sorted(read.items()):
    print(name, "read" if was_read else "refused", n)
"""


@pytest.fixture(scope="module")
def counts() -> dict[tuple[str, str], int]:
    """How many inputs of each target were read, and how many were refused."""
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, str(CORPUS)],
        env={"PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent}:{HERE}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(name, how): int(n) for name, how, n in lines}


def test_the_corpus_has_inputs_for_every_target(counts: dict[tuple[str, str], int]) -> None:
    from targets import TARGETS

    with tarfile.open(CORPUS) as tar:
        assert sum(counts.values()) == len(tar.getmembers()) > 300
    assert {name for name, _ in counts} == set(TARGETS)


def test_some_of_each_are_read_and_some_refused(counts: dict[tuple[str, str], int]) -> None:
    assert {how for _, how in counts} == {"read", "refused"}
    refused = {name for name, how in counts if how == "refused"}
    # Of a pickle the target itself says nothing: one decoder may read what another refuses.
    assert refused == {name for name, _ in counts} - {"pickled"}
