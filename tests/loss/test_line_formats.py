"""Every format is found out by itself, and every number of it is read with its unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptctl.errors import UsageError
from ckptctl.loss.formats.keys import FIELDS
from ckptctl.loss.reading import FORMATS, LogReader
from ckptctl.loss.rows import Marker, Number, Row

SAMPLES = json.loads((Path(__file__).parent / "data" / "samples.json").read_text())
PREFIXES = ("", "0: ", "[rank0]:", "[default7]:", "[rank 0] ", "\x1b[32m", "17: ")


def read(text: str | bytes, **options: object) -> tuple[LogReader, list[Row | Marker]]:
    reader = LogReader("train.log", **options)
    data = text.encode() if isinstance(text, str) else text
    return reader, [*reader.feed(data), *reader.end()]


def rows(text: str | bytes, **options: object) -> list[Row]:
    return [item for item in read(text, **options)[1] if isinstance(item, Row)]


def values(row: Row) -> dict[str, object]:
    told = {name: getattr(row, name) for name in FIELDS if name != "interval"}
    return {name: value for name, value in told.items() if value is not None}


def expected(sample: dict) -> dict[str, object]:
    return {
        name: Number(pytest.approx(value[0]), pytest.approx(value[1]))
        if isinstance(value, list)
        else value
        for name, value in sample["row"].items()
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["format"])
def test_a_sample_is_known_by_itself_and_read_whole(sample):
    reader, found = read("\n".join(sample["lines"]) + "\n")
    assert reader.format == sample["format"]
    assert [values(row) for row in found] == [expected(sample)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["format"])
def test_a_sample_is_read_alike_when_its_format_is_said(sample):
    text = "\n".join(sample["lines"]) + "\n"
    assert rows(text, format=sample["format"]) == rows(text)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "sample",
    # A table is a file of its own, no output of a launcher.
    [sample for sample in SAMPLES if sample["format"] != "csv"],
    ids=lambda sample: sample["format"],
)
def test_what_a_launcher_writes_before_a_line_changes_nothing(sample, prefix):
    lines = [prefix + line for line in "\n".join(sample["lines"]).split("\n")]
    assert [values(row) for row in rows("\n".join(lines) + "\n")] == [expected(sample)]


def test_every_format_has_a_sample():
    # DeepSpeed's own lines have no loss, and are read only when asked for.
    without = {"deepspeed", "mmengine-iter"}
    binary = {"tensorboard", "wandb", "trainer-state"}
    assert {sample["format"] for sample in SAMPLES} == set(FORMATS) - without - binary


def test_a_format_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(
        UsageError, match=r"--format gpt2: there is no such format; there are .*csv"
    ):
        LogReader("x", format="gpt2")
