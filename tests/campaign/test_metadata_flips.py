"""A small share of the flipped bits misses nothing, and the campaign can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import metadata_flips
import pytest
from made_pickles import metadata, text, weight
from metadata_flips import Flip, Tally, campaign

STEPS = ["torch-2.2.2/plain-2", "torch-2.9.1/fsdp2-4"]


@pytest.mark.parametrize("name", STEPS)
def test_no_flipped_bit_of_real_metadata_is_taken_for_the_truth(
    dcp_versions: Path, copy_of: Callable[[Path], Path], name: str
) -> None:
    step = copy_of(dcp_versions / name / "step_10")
    done = subprocess.run(
        [sys.executable, metadata_flips.__file__, str(step), "--flips", "300", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDEVMODE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert shown["flips"] == 300
    assert shown["missed"] == []
    assert min(sum(shown[kind].values()) for kind in ("rejected", "caught")) > 0
    assert [path.name for path in step.parent.iterdir()] == [step.name]


def flips_of(data: bytes, part: bytes) -> list[Flip]:
    """Every bit of the last place where `part` stands."""
    start = data.rindex(part)
    return [(at, bit) for at in range(start, start + len(part)) for bit in range(8)]


def flipped(data: bytes, part: bytes, found: str | None = None) -> Tally:
    return campaign(data, flips_of(data, part), lambda changed: found)


def test_a_change_that_nothing_finds_is_missed_and_told_with_its_place() -> None:
    data = weight()
    tally = flipped(data, b"__0_0.distcp")
    assert tally.n_flips == 12 * 8
    assert {names[0] for _, names in tally.missed} == {"range.file"}
    assert min(at for (at, _), _ in tally.missed) == data.rindex(b"__0_0.distcp")
    # A byte with its highest bit set is no ASCII, and no UTF-8 by itself.
    assert tally.rejected == {"metadata.unreadable": 12}


def test_a_change_that_is_found_is_caught_under_the_code_of_the_fault() -> None:
    tally = flipped(weight(), b"__0_0.distcp", "shard.missing")
    assert tally.caught == {"shard.missing": 12 * 7}
    assert not tally.missed


def test_a_change_of_what_no_load_shows_is_counted_by_its_name() -> None:
    tally = flipped(metadata(more=(text("version"), text("1.0.0"))), b"1.0.0")
    assert tally.invisible == {"version": 5 * 7}
    assert not tally.missed


def test_a_hint_that_changed_changes_nothing() -> None:
    data = weight(hint=b"K\x00")
    tally = campaign(data, [(data.rindex(b"K\x00") + 1, bit) for bit in range(8)], lambda _: None)
    assert tally.same == 8
