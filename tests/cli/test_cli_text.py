"""Lines, before they are printed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.cli.rendering import (
    Line,
    StyledText,
    line,
    made_safe,
    padded,
    page_lines,
    prose,
    wrapped,
)

WORDS = st.lists(st.text("ab é層", min_size=0, max_size=12), max_size=12)


def texts(a_line: Line, width: int | None) -> list[str]:
    return [part.text for part in wrapped(a_line, width)]


def test_prose_is_broken_at_spaces_and_hangs():
    assert texts(line("one two three four", hang=2), 9) == ["one two", "  three", "  four"]


def test_the_indentation_of_the_first_line_stays():
    assert texts(line("  one two", hang=4), 6) == ["  one", "    two"]


def test_a_path_is_never_broken():
    path = "/shared/checkpoints/run/step_1200"
    assert texts(line("see ", path, hang=2), 12) == ["see", f"  {path}"]
    assert texts(line("written to ", StyledText("a b c d e", "name"), solid=True), 12) == [
        "written to",
        "    a b c d e",
    ]


def test_a_command_stays_in_one_line():
    command = StyledText("ckptctl pick run", "command")
    assert texts(line("next: ", command, solid=True), 12) == ["next: ckptctl pick run"]


def test_a_row_of_a_table_is_broken_between_its_cells():
    assert texts(line("  step   12  1.2 KiB", solid=True), 12) == ["  step   12", "    1.2 KiB"]


def test_lines_hang_less_where_the_terminal_is_narrow():
    finding = line("  fault    shard.truncated  the file ends too early", hang=28)
    assert texts(finding, 30)[1:] == ["    the file ends too early"]


def test_off_a_terminal_nothing_is_broken():
    assert texts(line("word " * 100), None) == [("word " * 100).rstrip()]


def test_a_word_that_goes_over_two_styles_stays_whole():
    assert texts(line("aa ", StyledText("bb", "bad"), ",", " cc"), 5) == ["aa", "bb,", "cc"]


def test_styles_survive_a_break():
    parts = list(wrapped(line("aaa ", StyledText("bbb", "bad")), 4))
    assert [span for span in parts[1].spans if span.text] == [StyledText("bbb", "bad")]


@given(WORDS, st.integers(1, 30))
def test_wrapping_loses_no_word_and_changes_no_order(words, width):
    whole = line(*(f"{word} " for word in words))
    assert " ".join(texts(whole, width)).split() == whole.text.split()


@given(WORDS, st.integers(1, 30))
def test_no_line_is_too_long_but_for_a_single_word(words, width):
    for part in wrapped(line(*(f"{word} " for word in words)), width):
        assert part.width <= width or len(part.text.split()) <= 1 or not part.text.strip()


def test_a_cell_is_filled_up_and_never_cut():
    assert padded("ab", 4).text == "ab  "
    assert padded("ab", 4, right=True).text == "  ab"
    assert padded("abcdef", 4).text == "abcdef"


def test_every_piece_is_made_safe():
    assert made_safe(line("a\x1b", StyledText("\n", "bad"))).text == "a\\x1b\\n"


def test_a_number_is_not_parted_from_its_unit():
    whole = line("the median differs by +8.5 %, which took 12 s, of 300 MiB (9 %)")
    for width in range(8, 64):
        ends = [text.rstrip() for text in texts(whole, width)]
        assert not [text for text in ends if text[-1:].isdigit()], (width, ends)


def test_a_page_on_a_terminal_loses_no_line():
    page = "# H\ntext\n\n\n\n```sh\nx\n\n# y\n```\nand\nthen\n1. one\n   more\n2. two\n- a\n\n"
    shown = [each.text for each in page_lines(page, 80)]
    assert shown == [
        *("H", "text", "", "", "", "  x", "  ", "  # y", "and then", "1. one more", "2. two"),
        *("- a", ""),
    ]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "runbooks").glob("*.md")))
def test_a_runbook_on_a_terminal_is_shown_whole(path):
    text = path.read_text().replace("\n", "\r\n")
    shown = " ".join(" ".join(each.text for each in page_lines(text, 80)).split())
    for each in text.splitlines():
        if not each.startswith("```"):
            assert " ".join(prose(each.lstrip("#- ")).split()) in shown
