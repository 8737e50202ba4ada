"""Shards much younger than their metadata are suspicious; copies and slow saves are not."""

from __future__ import annotations

import pytest

from ckptctl.checks.shape import check_times
from ckptctl.findings import CODES, Severity
from ckptctl.model import FileInfo, Part, PartFormat, Step

NAMES = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp")


def codes(times: dict[str, float | None], part_path: str = "") -> list[tuple[str, str]]:
    files = tuple(FileInfo(path, 10, mtime_s) for path, mtime_s in times.items())
    part = Part(part_path, PartFormat.DCP, files)
    step = Step("/run/step_5", "step_5", 5, "dcp", (part,), files)
    return [(finding.code, finding.where) for finding in check_times(step, part, NAMES)]


def written(metadata: float | None, *shards: float | None) -> dict[str, float | None]:
    return {".metadata": metadata, **dict(zip(NAMES, shards, strict=False))}


def test_a_shard_of_a_later_save_among_older_ones_is_told():
    assert codes(written(1000, 990, 4000, 995)) == [("shard.newer", "__1_0.distcp")]
    assert codes(written(1000, 990, 4000, 4400), "pp0") == [("shard.newer", "pp0/__1_0.distcp")]


@pytest.mark.parametrize(
    ("why", "times"),
    [
        ("a save writes its metadata last", written(1000, 100, 990, 999)),
        ("a clock that is a little off", written(1000, 990, 1590, 995)),
        ("a copy that began with the metadata", written(1000, 1700, 2500, 9000)),
        ("a copy that ended with it", written(9000, 1700, 2500, 4000)),
        ("a copy of everything in a minute", written(1000, 980, 1020, 1060)),
        ("a store without times", written(None, None, None, None)),
        ("a shard without a time", written(1000, 990, None, 995)),
        ("a shard that is gone", written(1000, 990)),
        ("a file that no metadata names", {**written(1000, 990, 991, 992), "__9_0.distcp": 9000}),
    ],
)
def test_sound_steps_and_their_copies_draw_nothing(why, times):
    assert codes(times) == [], why


def test_it_is_a_warning_and_no_verdict():
    assert (CODES["shard.newer"].severity, CODES["shard.newer"].verdict) == (Severity.WARNING, None)
