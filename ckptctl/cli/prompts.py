"""Show a runbook to the person at a terminal, and ask before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ckptctl.cli.output import Output
from ckptctl.cli.text import EMPTY, Line, Span, Style, line
from ckptctl.runbook.document import DONE, NEXT, STOP, Block, Input, Outcome, State, Value, shown
from ckptctl.runbook.engine import NoTerminal
from ckptctl.runbook.executing import Ended

BLOCK_INDENT = 4
"""How far what a command prints is indented."""

_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "l": None, "leave": None}
_WAYS = {DONE: "done", STOP: "stop", NEXT: "continue"}


class TerminalPrompts:
    """Shows each step as it is done; without a terminal it asks nobody.

    `yes` agrees to every change that the page allows; `dry_run` to none. `repeated` are the
    options of the call that a next command needs again.
    """

    def __init__(
        self, out: Output, *, yes: bool, dry_run: bool, repeated: Sequence[str] = ()
    ) -> None:
        self.out = out
        self.yes = yes
        self.dry_run = dry_run
        self.repeated = repeated
        self._explained: set[str] = set()

    @property
    def attended(self) -> bool:
        """Whether a person can be asked."""
        return not self.yes and sys.stdin.isatty() and self.out.err.terminal and self.out.talks

    @property
    def columns(self) -> int | None:
        """How wide the blocks may write, beside their indentation."""
        return self.out.err.columns_inside(BLOCK_INDENT)

    def told(self, text: str) -> None:
        """A fact about the run, on a line of its own."""
        self._say(line(Span(text, "warn"), hang=2))

    def continues(self, run: str, begun: str) -> bool | None:
        """Ask whether a run that was found is continued."""
        if not self.attended:
            raise NoTerminal(
                f"the unfinished run {run} was found under this root, started by {begun}; "
                "--continue continues it, --new starts another"
            )
        return self._asked("Continue it? [y]es, [n]o, start another, [l]eave: ")

    def entering(self, state: State) -> None:
        """The heading of a state, and the first time what it is for."""
        self._say(EMPTY, line(Span(f"== {state.name}", "strong")))
        if state.name in self._explained:
            return
        self._explained.add(state.name)
        for paragraph in state.about.split("\n\n"):
            self._say(line("  ", " ".join(paragraph.split()), hang=2))

    def about_to(self, block: Block, values: Mapping[str, Value]) -> None:
        """The exact command, and what the names in it stand for."""
        self._say(EMPTY, *(_command(each) for each in block.code.splitlines()))
        self._say(
            *(line(f"    {name}={shown(value)}", solid=True) for name, value in values.items())
        )

    def printed(self, text: str) -> None:
        """A line of the command, indented below it."""
        is_next = text.startswith("next:")
        self._say(line(" " * BLOCK_INDENT, text, hang=BLOCK_INDENT, solid=is_next))

    def ended(self, block: Block, outcome: Outcome, ended: Ended | None) -> None:
        """What was expected where it is not what was found, and where that leads."""
        usual = block.outcomes[0]
        if ended is not None and ended.exit_code != usual.first:
            self._say(line(f"  expected: exit code {usual.first}: {usual.because}", hang=4))
        not_run = "assumed in a dry run" if self.dry_run and outcome is usual else "not run"
        found = not_run if ended is None else f"exit code {ended.exit_code}"
        style: Style = "good" if ended is not None and ended.exit_code == usual.first else "warn"
        leads = _WAYS.get(outcome.then, f"next: {outcome.then}")
        self._say(line("  found: ", Span(found, style), f": {outcome.because} ({leads})", hang=4))

    @property
    def assumes(self) -> bool:
        """A dry run assumes the decisions that the page expects."""
        return self.dry_run

    def decided(self, block: Block, decision: Input) -> str | None:
        """Have a person type a decision."""
        if self.yes:
            return ""
        if not self.attended:
            raise NoTerminal(
                f"the block {block.name!r} needs a decision, and there is no terminal to ask at; "
                f"--set {decision.name}=TEXT makes it, --yes makes none"
            )
        self.told(f"  A person decides: {decision.meaning}")
        self.out.err.write("  Type it, or [n]o, [l]eave here: ")
        typed = sys.stdin.readline()
        text = typed.strip()
        if not typed or text.lower() in ("l", "leave"):
            return None
        return "" if text.lower() in ("n", "no") else text

    def may(self, block: Block, *, again: bool, found: Sequence[str]) -> bool | None:
        """Ask whether a block may change something."""
        if self.dry_run or (self.yes and block.attended):
            return False
        if again and self.yes:
            raise NoTerminal(
                f"the block {block.name!r} was started before and its end is not known; "
                "look, then run this without --yes, or start another run with --new"
            )
        if found and not self.attended:
            raise NoTerminal(
                f"the block {block.name!r} would run a command with {', '.join(found)} from the "
                "record of the run, which anybody who can write to the root can change; give "
                "these again with --set, or run this at a terminal"
            )
        if self.yes:
            return True
        if not self.attended:
            raise NoTerminal(
                f"the block {block.name!r} changes something, and there is no terminal to ask at; "
                "--yes agrees to every change"
            )
        if again:
            self.told("  It was started before, and its end is not known.")
        if found:
            self.told(f"  From the record of the run, and not from you: {', '.join(found)}.")
        return self._asked("This changes something. Run it? [y]es, [n]o, [l]eave here: ")

    def _asked(self, question: str) -> bool | None:
        while True:
            self.out.err.write(f"  {question}")
            typed = sys.stdin.readline()
            if not typed:
                return None
            if typed.strip().lower() in _ANSWERS:
                return _ANSWERS[typed.strip().lower()]

    def _say(self, *lines: Line) -> None:
        if self.out.talks:
            self.out.lines(lines, to=self.out.err)


def _command(text: str) -> Line:
    return line("  ", Span(f"$ {text}", "strong"), solid=True)
