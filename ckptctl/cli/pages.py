"""The pages of `ckptctl explain`.

A page of `ckptctl/pages` for each finding code; verdicts and exit codes are
explained from the tables that decide them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from ckptctl.cli.exit_codes import EXIT_CODES
from ckptctl.errors import UsageError
from ckptctl.findings import CODES, EXIT_DENIED, Verdict

_VERDICTS = {
    Verdict.UNSAFE: "The step asks for code to run, or for a file outside itself. Nothing of it "
    "was run or read.",
    Verdict.UNKNOWN: "The storage did not let us look. The step may be good or bad.",
    Verdict.CHANGED: "Files came, went or changed while the step was looked at. Look again when "
    "nobody writes there.",
    Verdict.CORRUPT: "What is there is wrong: it contradicts itself or its own checksums.",
    Verdict.INCOMPLETE: "Something that should be there is not: a file, the end of a file, part "
    "of a tensor.",
    Verdict.IN_PROGRESS: "The save is not finished, and something was written a moment ago. Look "
    "again in a few minutes.",
    Verdict.UNVERIFIABLE: "Nothing in the step proves it good or bad at the level asked for.",
    Verdict.REJECTED: "A person or a job has marked the step as not to be used.",
    Verdict.SUPERSEDED: "The step belongs to a branch of the run that was abandoned when the job "
    "resumed from an older step.",
    Verdict.COMPLETE: "Everything that the metadata promises is there, as far as the level looked.",
}


_LOSS_VERDICTS = {
    "discontinuous": "Something is wrong that has no innocent cause: a counter, the data, the "
    "weights, or the level of the loss. Stop the job, reject the step, take another.",
    "suspect": "Something differs that should not, and the loss alone cannot say what. A person "
    "has to look.",
    "inconclusive": "Nothing speaks against the resume, and too little was logged for it. Wait, "
    "or give more of the logs.",
    "no-jump": "The level of the loss did not jump. A lost optimizer, lost random numbers, and "
    "data that is repeated or skipped show in no curve: only steps that were logged twice show "
    "them. After a clean stop a canary makes some: `ckptctl loss --canary`.",
    "continuous": "Steps that were logged twice agree: weights, optimizer, random numbers and "
    "data are those of before.",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One thing that can be explained: `kind` is `finding`, `verdict` or `exit-code`."""

    name: str
    kind: str
    title: str
    text: str


def page(name: str) -> Page:
    """The page of a finding code, a verdict or an exit code.

    Raises `UsageError` for anything else, with the names that come close.
    """
    if name in CODES:
        return Page(name, "finding", CODES[name].title, _text_of(name))
    if name in {verdict.value for verdict in Verdict}:
        return _verdict_page(Verdict(name))
    if name in _LOSS_VERDICTS:
        return _loss_verdict_page(name)
    if name.isascii() and name.isdigit() and int(name[:4]) in EXIT_CODES:
        return _exit_code_page(int(name))
    raise UsageError(
        f"there is nothing to explain under {name!r}{_close_to(name)}",
        next_command="ckptctl explain",
    )


def all_pages() -> Iterator[Page]:
    """Every page: finding codes, then verdicts, then exit codes."""
    for code in sorted(CODES):
        yield page(code)
    for verdict in Verdict:
        yield page(verdict.value)
    for word in _LOSS_VERDICTS:
        yield page(word)
    for number in EXIT_CODES:
        yield page(str(number))


def _text_of(code: str) -> str:
    file = resources.files("ckptctl").joinpath("pages").joinpath(f"{code}.md")
    heading, _, rest = file.read_text("utf-8").rstrip("\n").partition("\n")
    return f"{heading}: {CODES[code].title}\n\n{_consequence(code)}\n{rest}"


def _consequence(code: str) -> str:
    severity, verdict = CODES[code].severity.value.capitalize(), CODES[code].verdict
    if code.startswith("loss."):
        return f"{severity}: {_of_loss(code)}."
    if verdict is None:
        return f"{severity}: it makes no step unusable by itself."
    exit_code = EXIT_DENIED if code == "step.denied" else verdict.exit_code
    return f"{severity}: the step is `{verdict.value}` (`verify` exits with {exit_code})."


def _of_loss(code: str) -> str:
    from ckptctl.loss.verdict import FORCES

    forced = FORCES.get(code)
    if forced is None:
        return "it decides nothing about the loss by itself"
    return f"the loss is `{forced.value}` (`loss` exits with {forced.exit_code()})"


def _verdict_page(verdict: Verdict) -> Page:
    codes = sorted(code for code, meaning in CODES.items() if meaning.verdict is verdict)
    lines = [f"# {verdict.value}", "", _VERDICTS[verdict], ""]
    lines.append(f"`ckptctl verify` exits with {verdict.exit_code}.")
    if codes:
        lines += ["", "Findings that make a step so:", ""]
        lines += [f"- `{code}`: {CODES[code].title}" for code in codes]
    return Page(verdict.value, "verdict", _VERDICTS[verdict], "\n".join(lines))


def _loss_verdict_page(word: str) -> Page:
    from ckptctl.loss.verdict import FORCES, LossVerdict

    verdict = LossVerdict(word)
    lines = [f"# {word}", "", _LOSS_VERDICTS[word], ""]
    lines.append(f"`ckptctl loss` exits with {verdict.exit_code()}.")
    if verdict is LossVerdict.NO_JUMP:
        lines[-1] = f"{lines[-1][:-1]}, with `--strict` {verdict.exit_code(strict=True)}."
    codes = [code for code, forced in FORCES.items() if forced is verdict]
    if codes:
        lines += ["", "Findings that make it so:", ""]
        lines += [f"- `{code}`: {CODES[code].title}" for code in codes]
    return Page(word, "verdict", _LOSS_VERDICTS[word], "\n".join(lines))


def _exit_code_page(number: int) -> Page:
    code = EXIT_CODES[number]
    lines = [f"# exit code {number}: {code.title}", "", code.advice]
    lines += ["", f"Does trying again help? {code.retry.capitalize()}."]
    return Page(str(number), "exit-code", code.title, "\n".join(lines))


def _close_to(name: str) -> str:
    from difflib import get_close_matches

    names = [*CODES, *(verdict.value for verdict in Verdict), *_LOSS_VERDICTS]
    close = get_close_matches(name.lower(), names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
