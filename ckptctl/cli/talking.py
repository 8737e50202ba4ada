"""How does a runbook talk to the person at a terminal, and ask before it changes anything?"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ckptctl.cli.lines import EMPTY, Line, Span, Style, line
from ckptctl.cli.output import Output
from ckptctl.runbook.document import DONE, NEXT, STOP, Block, Outcome, State
from ckptctl.runbook.engine import NobodyToAsk
from ckptctl.runbook.executing import Ended

BLOCK_INDENT = 4
"""How far what a command prints is indented."""

_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "l": None, "leave": None}
_WAYS = {DONE: "done", STOP: "stop", NEXT: "go on"}


class TalkInTerminal:
    """Says what is done as it is done; without a terminal it asks nobody.

    `yes` takes every change as agreed to; `dry_run` takes none.
    """

    def __init__(self, out: Output, *, yes: bool, dry_run: bool) -> None:
        self.out = out
        self.yes = yes
        self.dry_run = dry_run
        self._explained: set[str] = set()

    def entering(self, state: State) -> None:
        """The heading of a state, and the first time what it is for."""
        self._say(EMPTY, line(Span(f"== {state.name}", "strong")))
        if state.name in self._explained:
            return
        self._explained.add(state.name)
        for paragraph in state.about.split("\n\n"):
            self._say(line("  ", " ".join(paragraph.split()), hang=2))

    def about_to(self, block: Block, values: Mapping[str, str]) -> None:
        """The exact command, and what the names in it stand for."""
        self._say(EMPTY, *(_command(each) for each in block.code.splitlines()))
        self._say(*(line(f"    {name}={value}", solid=True) for name, value in values.items()))

    def printed(self, text: str) -> None:
        """A line of the command, indented below it."""
        is_next = text.startswith("next:")
        self._say(line(" " * BLOCK_INDENT, text, hang=BLOCK_INDENT, solid=is_next))

    def ended(self, block: Block, outcome: Outcome, ended: Ended | None) -> None:
        """What was expected where it is not what was found, and where that leads."""
        usual = block.outcomes[0]
        if ended is not None and ended.exit_code != usual.first:
            self._say(line(f"  expected: exit code {usual.first}: {usual.because}", hang=4))
        found = "not run" if ended is None else f"exit code {ended.exit_code}"
        style: Style = "good" if ended is not None and ended.exit_code == usual.first else "warn"
        leads = _WAYS.get(outcome.then, f"next: {outcome.then}")
        self._say(line("  found: ", Span(found, style), f": {outcome.because} ({leads})", hang=4))

    def may(self, block: Block, *, again: bool) -> bool | None:
        """Ask."""
        if self.dry_run:
            return False
        if again and self.yes:
            raise NobodyToAsk(
                f"the block {block.name!r} was begun before and nobody knows how it ended; "
                "look, then run this without --yes, or begin anew with --new"
            )
        if self.yes:
            return True
        return self._asked(block, again=again)

    def _asked(self, block: Block, *, again: bool) -> bool | None:
        if not sys.stdin.isatty() or not self.out.err.terminal or not self.out.talks:
            raise NobodyToAsk(
                f"the block {block.name!r} changes something, and there is no terminal to ask at; "
                "--yes agrees to every change"
            )
        if again:
            self._say(
                line(Span("  It was begun before, and nobody knows how it ended.", "warn"), hang=2)
            )
        while True:
            self.out.err.write("  This changes something. Run it? [y]es, [n]o, [l]eave here: ")
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
