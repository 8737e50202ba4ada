"""Every command, option, exit code and finding code is documented, and the documents are true."""

from __future__ import annotations

import re
import runpy
from importlib import resources
from pathlib import Path

import pytest
from error_classes import every_error
from every_case import all_cases

import ckptctl
from ckptctl.cli.commands import (
    COMMANDS,
    SUMMARIES,
    command_of,
    exit_codes,
    help_lines,
    keys_of,
    load,
)
from ckptctl.cli.config import CONFIGURED
from ckptctl.cli.explain import all_pages, page
from ckptctl.cli.options import COMMAND_LINE_ONLY
from ckptctl.cli.pictures import STEP_MARKS
from ckptctl.findings import CODES, Verdict

REPOSITORY = Path(__file__).resolve().parent.parent.parent
REFERENCE = (REPOSITORY / "docs" / "reference.md").read_text()
HELP = {"-h", "--help"}
PAGES = resources.files("ckptctl") / "pages"


def options(command: str) -> list:
    return [p for p in command_of(command).params if p.param_type_name == "option"]


def help_of(command: str, *, whole: bool = True) -> str:
    return "\n".join(each.text for each in help_lines(command_of(command), whole=whole))


def test_the_reference_is_what_the_command_line_says():
    tool = runpy.run_path(str(REPOSITORY / "tools" / "reference.py"))
    for path in tool["PAGES"]:
        text = path.read_text()
        assert tool["renewed"](text) == text, "run: python tools/reference.py"


def test_the_manual_page_is_what_the_command_line_says():
    tool = runpy.run_path(str(REPOSITORY / "tools" / "man_page.py"))
    page = (REPOSITORY / "docs" / "man" / "ckptctl.1").read_text()
    assert tool["manual_page"]() == page, "run: make generate"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text_a_row_in_the_reference_and_its_variable(command):
    (without_variable,) = re.findall(r"consent to it \((.*?)\), have no variable", REFERENCE)
    for option in options(command):
        name = max(option.opts, key=len)
        if name in HELP:
            continue
        assert option.help, name
        assert option.help.endswith("."), name
        assert f"`{name}`" in REFERENCE, name
        variable = "CKPTCTL_" + name.strip("-").replace("-", "_").upper()
        if name in COMMAND_LINE_ONLY:
            # The warning about its variable finds the option by the parameter's name.
            assert name == "--" + option.name.replace("_", "-")
            assert option.envvar is None, name
            assert f"`{name}`" in without_variable, name
        else:
            assert option.envvar == variable or f"`{option.envvar}`" in REFERENCE, name
            assert f"`{name}`" not in without_variable, name


def test_a_variable_means_the_same_to_every_command():
    """A job inherits what was exported for another command."""
    meanings: dict[str, set] = {}
    for option in (each for command in COMMANDS for each in options(command)):
        if option.envvar is not None:
            values = option.metavar or tuple(getattr(option.type, "choices", ()))
            meanings.setdefault(option.envvar, set()).add((option.opts[0], values))
    assert [variable for variable, found in meanings.items() if len(found) > 1] == []


def test_options_without_a_variable_are_those_that_change_or_remove():
    without = {
        max(option.opts, key=len)
        for command in COMMANDS
        for option in options(command)
        if option.envvar is None
    }
    assert without - HELP <= COMMAND_LINE_ONLY
    assert {"--apply", "--unsealed", "--yes"} <= without
    assert "--allow-fresh" not in COMMAND_LINE_ONLY


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_do_json_quiet_report_color_and_debug(command):
    names = {name for option in options(command) for name in option.opts}
    assert {"--json", "--quiet", "-q", "--report", "--color", "--debug"} <= names


def test_one_variable_means_one_option():
    of: dict[str, set[str]] = {}
    for command in COMMANDS:
        for option in options(command):
            if option.envvar:
                of.setdefault(option.envvar, set()).add(max(option.opts, key=len))
    assert all(len(names) == 1 for names in of.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_a_statement_and_ends_with_the_exit_codes(command):
    loaded = load(command)
    (summary,) = (each[command] for each in SUMMARIES.values() if command in each)
    assert command_of(command).help.splitlines()[0] == summary
    assert summary.endswith(".")
    assert len(loaded.examples) in (2, 3)
    shown, end = help_of(command).split("Exit codes:\n")
    for example in loaded.examples:
        assert f"ckptctl {command} " in example
        assert f"  {example}\n" in shown
    assert [int(code) for code in re.findall(r"^  ([0-9]+)", end, re.M)] == [*loaded.exit_codes]
    assert 0 in loaded.exit_codes
    assert 2 in loaded.exit_codes


@pytest.mark.parametrize("command", COMMANDS)
def test_the_short_help_shows_at_most_twelve_options_and_the_whole_one_names_them_all(command):
    short = re.findall(r"^  (-[a-z-]+)", help_of(command, whole=False), re.M)
    assert len(set(short) - HELP) <= 12
    shown = help_of(command)
    for option in options(command):
        listed = re.search(rf"(^  |, |\): ){option.opts[0]}\b", shown, re.M)
        assert (listed is None) is option.hidden, option.opts
    if command in CONFIGURED:
        for key, about in keys_of(command).items():
            assert not about.declared.setting or re.search(rf"[:,]\s+{key}\b", shown), key


def test_a_hidden_option_is_a_setting_or_of_a_runbook_or_of_a_process_of_ckptctl():
    texts = [path.read_text() for path in (REPOSITORY / "runbooks").glob("*.md")]
    started = (REPOSITORY / "ckptctl" / "preflight_checks" / "nodes.py").read_text()
    for command in CONFIGURED:
        settings = [key.name for key in keys_of(command).values() if key.declared.setting]
        texts += [f"--{name.replace('_', '-')}" for name in settings]
    for option in (each for command in COMMANDS for each in options(command) if each.hidden):
        assert any(option.opts[0] in text for text in (*texts, started)), option.opts


@pytest.mark.parametrize("number", exit_codes())
def test_every_exit_code_is_documented_and_explained(number):
    assert f"\n| {number} | " in REFERENCE
    assert page(str(number)).text.startswith(f"# exit code {number}: ")


def test_every_exit_code_that_something_can_have_is_in_the_table():
    used = {verdict.exit_code for verdict in Verdict}
    used |= {error.exit_code for error in every_error()}
    used |= {code for name in COMMANDS for code in load(name).exit_codes}
    assert used <= set(exit_codes())


def test_there_is_a_page_for_every_finding_code_and_none_besides():
    assert {path.name.removesuffix(".md") for path in PAGES.iterdir()} == set(CODES)


def check_sections(code):
    text = page(code).text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        f"# {code}: {CODES[code].title}",
        "## What it means",
        "## Where it comes from",
        "## What to do",
    ]
    for section in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        assert section.strip()
    assert len(text.splitlines()) < 60


def check_commands(code):
    for command in re.findall(r"^ckptctl (.*)$", page(code).text, flags=re.MULTILINE):
        name, *words = command.split("#")[0].split()
        if name == "explain":
            page(words[0])
            continue
        known = {option for each in options(name) for option in each.opts}
        assert {word for word in words if word.startswith("-")} <= known, command


@pytest.mark.parametrize("check", [check_sections, check_commands], ids=lambda f: f.__name__)
def test_a_page_says_what_it_means_where_it_comes_from_and_what_to_do(check):
    with all_cases() as case:
        for code in sorted(CODES):
            with case(code):
                check(code)


def test_no_page_explains_nothing():
    assert all(each.text.strip() and each.title for each in all_pages())


def test_the_version_is_the_same_everywhere_and_a_released_one_has_its_changes():
    project = (REPOSITORY / "pyproject.toml").read_text()
    (version,) = re.findall('^version = "(.+)"$', project, re.M)
    assert ckptctl.__version__ == version
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    sections = re.findall(r"^## \[(.+?)\]( - \d{4}-\d{2}-\d{2})?$", changelog, re.M)
    assert sections[0] == ("Unreleased", "")
    assert all(name and date for name, date in sections[1:])
    released = [name for name, _ in sections[1:]]
    assert version.endswith(".dev0") or version == released[0]
    assert version.removesuffix(".dev0") not in released[1:]


def test_every_glyph_is_in_the_reference():
    for mark in STEP_MARKS.values():
        assert f"| `{mark.glyph}` | `{mark.ascii}` |" in REFERENCE, mark.word


def test_the_verdicts_of_the_design_are_those_of_the_program():
    design = (REPOSITORY / "docs" / "design.md").read_text()
    for verdict in Verdict:
        assert f"`{verdict.value}`" in design


def test_every_module_that_a_document_names_exists():
    named = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|toml))`")
    places = (REPOSITORY, REPOSITORY / "ckptctl")
    assert [
        f"{path}: {name}"
        for path in sorted((REPOSITORY / "docs").rglob("*.md"))
        for name in set(named.findall(path.read_text()))
        if not any((place / name).exists() for place in places)
    ] == []


def test_every_document_has_its_place_in_the_site():
    contents = (REPOSITORY / "docs" / "site" / "contents.md").read_text().split()
    pages = (REPOSITORY / "docs").glob("*.md")
    assert [page.name for page in pages if f"docs/{page.stem}" not in contents] == []
