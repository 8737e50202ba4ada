"""The pages that ckptctl ships are sound, and the checks notice when one is not."""

from __future__ import annotations

import pytest
from page_checks import problems, unquoted

from ckptctl.errors import UsageError
from ckptctl.runbook.document import Runbook, find_runbook, parse, runbook_names

RB_7 = find_runbook("rb-7").text


@pytest.mark.parametrize("name", runbook_names())
def test_a_page_that_is_shipped_is_sound(name):
    assert problems(find_runbook(name)) == ()


def test_the_flow_of_rb_7_is_that_of_its_tables():
    book = find_runbook("RB-7")
    assert [state.name for state in book.states] == [
        "Classify",
        "MendJob",
        "DrainNode",
        "Locate",
        "Damaged",
        "Nodes",
        "Capacity",
        "Verify",
        "LostState",
        "Resume",
        "WatchLoss",
        "Confirm",
        "Suspect",
        "Throughput",
        "Cadence",
        "Spacing",
        "Jump",
        "Fallback",
    ]


def broken(old: str, new: str) -> Runbook:
    assert RB_7.count(old) == 1, old
    return parse(RB_7.replace(old, new), "rb-7.md")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("## Severity", "## Weight", "the section Severity is missing"),
        ("    [*] --> Classify\n", "", "the diagram in the section Flow needs one arrow `[*]"),
        (
            "    Resume --> WatchLoss\n",
            "",
            "a table leads from Resume to WatchLoss, but the diagram has no such arrow",
        ),
        (
            "    Cadence --> [*]",
            "    WatchLoss --> Resume: again\n    Cadence --> [*]",
            "the diagram has an arrow from WatchLoss to Resume, but no table leads there",
        ),
        (
            "    Cadence --> [*]",
            "    WatchLoss --> Celebrate: yes\n    Cadence --> [*]",
            "the state 'Celebrate' of the diagram has no section with a command block",
        ),
        ("name=verify reads brief", "name=survey reads", "the block name 'survey' occurs 2 times"),
        ("`WORLD_SIZE: number`", "`WORLD_SIZE: rank`", "`WORLD_SIZE` has the type 'rank'; types"),
        ("| `3600` |", "| `1h` |", "the default of `WAIT` must be a whole number"),
        (
            "decides=MENDED",
            "decides=RESUME",
            "MendJob, block 'mended': it decides RESUME, which is not in the table of decisions",
        ),
        (
            "name=verify reads",
            "name=verify reads overrides asks=RANKS",
            "Verify, block 'verify': `overrides` is for a block that `decides`",
        ),
        (
            "| other | stop | no step could be chosen |\n",
            "",
            (
                "Locate, block 'preflight': the table has no row `other`, so an unexpected end"
                " leads nowhere"
            ),
        ),
        (
            "| not run | | stop 31 | the loss was not checked: continue",
            "| not run | | stop | the loss was not checked: when",
            "WatchLoss, block 'loss': `not run` has no exit code; use `stop N`",
        ),
        (
            "| too often | Damaged | ",
            "| 99 | Damaged | ",
            "Fallback, block 'reject': it has at-most, but the table has no row `too often`",
        ),
        (
            'verify "$STEP" --level "$LEVEL" --require',
            'verify "$STEP" --level "$DEPTH" --require',
            "Verify, block 'verify': $DEPTH is not an input, and no block sets it",
        ),
        (
            "| 0 | Resume | the step is whole: weights, optimizer, RNG and data position |",
            "| 0 | next | the step is whole: weights, optimizer, RNG and data position |",
            "Verify, block 'verify': it is the last of its state, so `next` leads nowhere",
        ),
        (
            "| `ROOT` | the checkpoint root | required",
            "| `ROOT` | the checkpoint root | `/ckpt`",
            "the input `ROOT` is missing, or not required: the state of a run lies under it",
        ),
        (
            "| 0 | WatchLoss | the job was started from the step |",
            "| 0 | WatchLoss | |",
            "Resume, block 'resume': a row has no reason (`because`)",
        ),
    ],
)
def test_the_checks_names_what_is_not_sound(old, new, problem):
    assert any(found.startswith(problem) for found in problems(broken(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('classify --print-word "${LOG[@]}"', "classify --print-word $LOG", "$LOG is not quoted"),
        (
            'classify --print-word "${LOG[@]}"',
            'classify --print-word "$LOG"',
            "use the whole list LOG",
        ),
        ('ckptctl cost "$ROOT" ', "ckptctl cost $ROOT ", "$ROOT is not quoted"),
        ('ckptctl cost "$ROOT" ', 'ckptctl cost "$(echo $ROOT)" ', "$ROOT is not quoted"),
        ('eval "$RESUME"\n```', "eval $RESUME\n```", "eval runs one input and nothing else"),
        ('eval "$RESUME"\n```', 'bash -c "$RESUME"\n```', "the value would be run as code"),
        ('eval "$RESUME"\n```', 'eval "resume $STEP"\n```', "eval runs one input and nothing else"),
        ("name=resume changes", "name=resume reads", "it runs an input as a command"),
        (
            "| `WAIT: number` |",
            "| `BASH_ENV` |",
            "`BASH_ENV` changes how a shell or a program works",
        ),
        ("| `DRAIN` |", "| `DRAIN...` |", "$DRAIN is run as a command, but is not an input with"),
        (" runs=LAUNCHER", "", "$LAUNCHER is started by a program, so the block needs"),
    ],
)
def test_the_checks_refuses_what_lets_a_value_become_more_than_an_argument(old, new, problem):
    assert any(problem in each for each in problems(broken(old, new)))


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('a "$A" "${B}" "${C[@]}" x"$D"y', []),
        ("a $A ${B} ${C[@]} x$D", ["A", "B", "C", "D"]),
        ('${A:+--a "$A"} ${B+x}', []),
        ("${A:+--a $A} ${B:-$C}", ["A", "B", "C"]),
        ('"${A:-$B}" "$(a $C "$D")" $(a "$E")', ["C"]),
        ("'$A' \\$B \"\\$C\" # it's $D\n$E", ["E"]),
        ('"#" "it\'s" "$A" (b $C) {d,$E}', ["C", "E"]),
        ('"a # $A" "\'$B\'" $? $$ $! $#', []),
    ],
)
def test_the_checks_knows_what_bash_splits(code, names):
    assert list(unquoted(code)) == names


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# RB-7: Resume", "# Resume", "rb-7.md:1: a runbook begins with a line `# NAME: TITLE`"),
        ("name=classify reads asks", "name=classify asks", "a block needs `reads`, `changes`"),
        ("at-most=2", "at-most=two", "at-most is a number up to 999, not 'two'"),
        ("survey reads sets=STEP", "survey reads set=STEP", "a block has no 'set'"),
        (
            "| 20-21 | Fallback",
            "| bad | Fallback",
            "a row is for an exit code, `not run`, `too often`",
        ),
        (
            "| stop 93 | a suspected",
            "| halt 93 | a suspected",
            "the next step is `next`, `done`, `stop`",
        ),
        ("| 26 | stop |", "| 26 |", "the row has 2 cells, not 3"),
    ],
)
def test_a_page_that_is_not_in_form_is_refused_with_its_line(old, new, said):
    with pytest.raises(UsageError, match=r"^rb-7\.md:\d+: ") as refused:
        broken(old, new)
    assert said in refused.value.message


def test_a_runbook_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match="there are gpu-fault, mfu-regression, nccl-hang, rb-7"):
        find_runbook("rb-99")
