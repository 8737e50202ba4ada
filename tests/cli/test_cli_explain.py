"""What `explain` finds and how it lays a page out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_case import all_cases

from ckptctl.cli.commands import exit_codes
from ckptctl.cli.explain import all_pages, index_lines, page
from ckptctl.cli.rendering import page_lines, wrapped
from ckptctl.diagnostics.advice import CHECKS
from ckptctl.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
HEADING = re.compile("^#+ (.*)$", re.M)


def test_a_code_a_verdict_an_exit_code_and_a_cause_are_explained():
    assert page("shard.truncated").kind == "finding"
    assert page("incomplete").kind == "verdict"
    assert page("20").kind == "exit-code"
    assert page("infra-node").kind == "cause"
    assert page("signal.no-trap").kind == "check"


def names_of_doctor() -> Iterator[str]:
    """The names that the sources of `doctor` report under."""
    for path in (REPOSITORY / "ckptctl" / "diagnostics").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node, "func", None)
            if isinstance(called, ast.Name) and called.id in ("Advice", "Mistake", "advice_of"):
                names = ast.walk(node.args[0])
                yield from (name.value for name in names if isinstance(name, ast.Constant))


def test_every_check_of_doctor_is_explained_and_no_other():
    assert sorted(set(names_of_doctor())) == sorted(CHECKS)


def test_a_group_of_checks_is_listed():
    with pytest.raises(UsageError, match=r"below it are .*storage\.clock"):
        page("storage")


def test_a_page_says_what_a_code_does_to_a_step():
    assert "the step is `incomplete` (`verify` exits with 20)" in page("shard.truncated").text
    assert "the step is `unknown` (`verify` exits with 77)" in page("step.denied").text
    assert "Note: it does not make a step unusable" in page("shard.orphan").text


def test_a_cause_says_whether_a_restart_helps():
    assert "A restart helps.\n`ckptctl classify --quiet` prints `infra" in page("infra-node").text
    assert page("unknown").kind == "verdict"


def test_a_verdict_names_the_codes_that_force_it():
    assert "- `record.crc`: " in page("corrupt").text
    assert "record.crc" not in page("incomplete").text


@pytest.mark.parametrize(
    "name", ["shard.truncted", "incomplet", "4", "0404", "999999999999999999999", "", "²"]
)
def test_what_is_not_there_is_an_error(name):
    with pytest.raises(UsageError, match=f"nothing to explain under the name '{name}'"):
        page(name)


def test_what_comes_close_is_offered():
    with pytest.raises(UsageError, match=r"did you mean shard\.truncated"):
        page("shard.truncted")


def test_a_page_keeps_every_word_when_it_is_laid_out():
    with all_cases() as case:
        for each in all_pages():
            with case(each.name):
                lines = page_lines(each.text, 80)
                laid_out = [part.text for one in lines for part in wrapped(one, 80)]
                written = re.sub("^#+ |```(sh)?", "", each.text, flags=re.M)
                assert " ".join(laid_out).split() == written.split()
                assert all(len(text) <= 80 for text in laid_out if not text.startswith("  "))


def test_it_is_said_plainly_whether_trying_again_helps():
    for number, code in exit_codes().items():
        assert re.match(r"(yes|no|not needed)\b", code.retry), number


def test_off_a_terminal_a_page_is_as_it_was_written():
    text = page("shard.truncated").text
    assert "\n".join(one.text for one in page_lines(text, None)) == text


def test_the_index_lists_every_page():
    pages = list(all_pages())
    listed = [one.text.split()[0] for one in index_lines(pages) if one.text.startswith("  ")]
    assert listed == [each.name for each in pages]
