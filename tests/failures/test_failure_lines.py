"""Single lines, labelled: what each is evidence of, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptctl
from ckptctl.failures.classes import CLASSES

HERE = Path(__file__).parent


def labelled(name: str) -> list[tuple[str, str]]:
    """Class and text of every line; `none` for a line that is evidence of nothing."""
    rows = [line.split("\t", 1) for line in (HERE / name).read_text().splitlines()]
    return [(failure, text) for failure, text in rows]


def said(tmp_path: Path, text: str) -> str:
    log = tmp_path / "one.log"
    log.write_text(text + "\n")
    answer = ckptctl.classify(str(log))
    return answer.failure if answer.evidence else "none"


@pytest.mark.parametrize("name", ["lines_a.tsv"])
def test_every_line_is_evidence_of_what_its_label_says(name, tmp_path):
    wrong = [
        f"{want} is taken for {got}: {text}"
        for want, text in labelled(name)
        if (got := said(tmp_path, text)) != want
    ]
    assert wrong == []


def test_the_labels_are_classes():
    assert {failure for failure, _ in labelled("lines_a.tsv")} <= set(CLASSES)
