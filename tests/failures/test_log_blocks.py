"""Where a log is cut into blocks changes nothing of what is found in it."""

from __future__ import annotations

import gzip
from pathlib import Path
from uuid import uuid4

import pytest
from command_line import run_ckptctl
from hypothesis import given
from hypothesis import strategies as st

import ckptctl
from ckptctl.failures.matching import FailureLogReader
from ckptctl.failures.rules import _HEALTHY_TEXTS, RULES, find_literals
from ckptctl.logs.sources import log_blocks
from ckptctl.options import StorageOptions
from ckptctl.storage.logs import logs_below
from ckptctl.storage.opening import open_store

HERE = Path(__file__).parent
LINES = (
    *(
        line.split("\t", 1)[1]
        for name in ("lines_a.tsv", "lines_b.tsv")
        for line in (HERE / name).read_text().splitlines()
    ),
    "[rank3]: Traceback (most recent call last):",
    '[rank3]:   File "train.py", line 1, in <module>',
    "[rank3]: ValueError: loss is nan",
    "Traceback (most recent call last):",
    "Root Cause (first observed failure):",
    "  host      : node017",
    "  rank      : 3 (local_rank: 3)",
    "==========",
    "2026-11-20 03:12:44 INFO step 12 loss 2.31",
    "2026-11-20 03:12:45 INFO step 13 loss inf",
    "consumed samples: 32 | lm loss: 2.1E+00 | number of nan iterations:   0 |",
    "global batch size: 32 |",
    "consumed samples: 64 | lm loss: nan | number of nan iterations:   1 |",
    "INFO all is well, İ ſ \u212a",
    "",
)
FALLEN = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@given(st.lists(st.sampled_from(LINES), max_size=40), st.data())
def test_any_split_into_blocks_finds_what_is_found_line_by_line(lines, data):
    numbered = [*enumerate(lines, 1)]
    cuts = data.draw(st.lists(st.integers(0, len(lines)), max_size=6).map(sorted))
    whole, alone = FailureLogReader("a.log"), FailureLogReader("a.log")
    found = [
        (each, whole.n_progress)
        for start, stop in zip([0, *cuts], [*cuts, len(lines)], strict=True)
        for each in whole.take(numbered[start:stop])
    ]
    assert found == [(each, alone.n_progress) for line in numbered for each in alone.take([line])]
    assert (whole.n_progress, whole.first_failed) == (alone.n_progress, alone.first_failed)


@given(st.lists(st.sampled_from(LINES), max_size=40))
def test_every_rule_is_asked_on_the_lines_that_hold_one_of_its_literals(lines):
    hits = find_literals(lines)
    for index, line in enumerate(lines):
        lower = line.lower()
        for healthy in _HEALTHY_TEXTS.values():
            lower = lower.replace(healthy.decode(), "")
        asked = {
            number
            for number, rule in enumerate(RULES)
            if any(literal in lower for literal in rule.literals)
        }
        assert hits.rules.get(index, frozenset()) == asked
        assert (index in hits.losses) == ("loss" in lower)


@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=40))
def test_no_needle_is_found_across_the_end_of_a_line(lines):
    one_by_one = [find_literals([line]).rules.get(0) for line in lines]
    together = find_literals(lines).rules
    assert [together.get(index) for index in range(len(lines))] == one_by_one


def test_a_line_that_lies_across_blocks_is_one_line_plain_packed_and_piped(tmp_path):
    lines = [f"step line {n} " + "x" * (n % 300) for n in range(20_000)]
    lines[10_000] += "\rwritten over\x1b[31m in red"
    text = "\n".join([*lines, f"Nov 20 03:12:44 node017 kernel: {FALLEN}"]).encode()
    (tmp_path / "plain.log").write_bytes(text)
    (tmp_path / "packed.log").write_bytes(gzip.compress(text))
    blocks = [*log_blocks(str(tmp_path / "plain.log"))]
    read = [line for block in blocks for line in block]
    assert len(blocks) > 2
    assert read[10_000:10_002] == [
        (10_001, lines[10_000].split("\r")[0]),
        (10_001, "written over in red"),
    ]
    assert [number for number, _ in read] == sorted([*range(1, 20_002), 10_001])
    assert [line for block in log_blocks(str(tmp_path / "packed.log")) for line in block] == read
    answer = ckptctl.classify(str(tmp_path / "plain.log"))
    assert (answer.evidence[0].line, answer.node) == (20_001, "node017")
    assert run_ckptctl("classify", "-q", "-", input=text.decode()).stdout == "infrastructure\n"


@pytest.mark.parametrize("end", ["", "/"])
def test_a_prefix_of_an_object_store_stands_for_the_logs_below_it(end):
    root = f"memory://job-{uuid4().hex}"
    with open_store(root) as store:
        store.put("logs/1/stdout.log", FALLEN.encode())
        store.put("logs/0/empty.log", b"")
    storage = StorageOptions()
    assert logs_below(f"{root}/logs{end}", storage) == (f"{root}/logs/1/stdout.log",)
    assert logs_below(f"{root}/logs/1/stdout.log", storage) == (f"{root}/logs/1/stdout.log",)
    (found,) = log_blocks(f"{root}/logs/1/stdout.log")
    assert found == [(1, FALLEN)]
