"""Measure `ckptctl classify` on the labelled lines and logs, and bring docs/classify.md up to date.

    python tools/classify_scores.py

The rules were developed on the lines of `lines_a.tsv`; those of `lines_b.tsv` were only
counted. Figures and the table of classes are written between the marks of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import ckptctl
from ckptctl.failures.classifying import decide
from ckptctl.failures.matching import FailureLogReader, folded
from ckptctl.failures.results import CLASSES

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "classify.md"
CORPUS = REPOSITORY / "tests" / "failures"
_BLOCK = re.compile(r"(<!-- (?P<name>classes|scores) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(renewed(PAGE.read_text()))
    return 0


def renewed(text: str) -> str:
    """The page with its tables written anew."""
    writers = {"classes": _classes, "scores": _scores}
    return _BLOCK.sub(lambda m: m[1] + "".join(f"{row}\n" for row in writers[m["name"]]()), text)


def _classes() -> Iterator[str]:
    for each in CLASSES.values():
        yield f"| `{each.domain.value}` | `{each.name}`: {each.means} |"


def labelled(name: str) -> list[tuple[str, str]]:
    """Class and text of every line; `none` for a line that is evidence of nothing."""
    rows = (line.split("\t", 1) for line in (CORPUS / name).read_text().splitlines())
    return [(failure, text) for failure, text in rows]


def answer_for(text: str) -> str:
    """The class that a line alone is evidence of, or `none`."""
    reader = FailureLogReader("one line")
    decisive = decide(folded((reader, found) for found in reader.take([(1, text)]))).decisive
    return decisive.failure if decisive else "none"


def _scores() -> Iterator[str]:
    for half, name in (("first", "lines_a.tsv"), ("second", "lines_b.tsv")):
        answers = [(want, answer_for(text)) for want, text in labelled(name)]
        right = sum(want == answer for want, answer in answers)
        yield f"- Lines of the {half} half: {right} of {len(answers)} right."
    logs = sorted(path for path in (CORPUS / "logs").iterdir() if path.is_dir())
    right = sum(ckptctl.classify(f"{path}/").failure == path.name.split("--")[0] for path in logs)
    yield f"- Whole logs: {right} of {len(logs)} right."


if __name__ == "__main__":
    raise SystemExit(main())
