"""`ckptctl explain`: print the page of a code, a verdict, an exit code, a cause or a check.

A page of `ckptctl/pages` for each finding code; verdicts, exit codes, the causes that
`classify` names and the checks of `doctor` are explained from their tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import Annotated

from ckptctl.cli import exit_codes
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, next_line, padded, page_lines
from ckptctl.diagnostics.advice import CHECKS
from ckptctl.errors import UsageError
from ckptctl.failures.results import CLASSES, FailureClass, Restart
from ckptctl.findings import CODES, EXIT_DENIED, Verdict
from ckptctl.formatting import command_line, listed
from ckptctl.options import Parameter

EXAMPLES = ("ckptctl explain shard.truncated", "ckptctl explain 20")
EXIT_CODES = (0, 2)


def explain(
    name: Annotated[
        str | None,
        Parameter(
            "CODE",
            "A finding code, a verdict, an exit code, a cause of classify, a check of doctor, "
            "or the name of a document; without one all of them but the documents are listed.",
        ),
    ] = None,
    site: Annotated[
        str | None,
        Parameter(
            "--site URL",
            "Where the documentation is published, as `make docs` builds it; the address of "
            "the page is then printed as well.",
        ),
    ] = None,
    *,
    out: Output,
) -> int:
    """Explain a code or word that ckptctl prints, and what to do about it.

    With --quiet the title alone is printed. Of a document of --json (`ckptctl.pick/1`) the JSON
    Schema is printed.
    """
    if name is not None and name.startswith("ckptctl."):
        from ckptctl.cli.schemas import schema

        out.document(partial(schema, name))
        return 0
    pages = [page(name)] if name is not None else [*all_pages()]
    base = (site or _published()).rstrip("/")
    pages = [replace(page, address=f"{base}/{page.address}" if base else None) for page in pages]
    out.answer(
        document_of("explain", explained=pages),
        lambda: index_lines(pages) if name is None else _lines(pages[0], out.out.width),
        bare=(page.name if name is None else page.title for page in pages),
    )
    return 0


def _lines(page: Page, width: int | None) -> Iterator[Line]:
    yield from page_lines(page.text, width)
    if page.address is not None:
        yield EMPTY
        yield line("page of the documentation: ", StyledText(page.address, "name"), solid=True)


_HEADINGS = {
    "finding": "finding codes",
    "verdict": "verdicts",
    "exit-code": "exit codes",
    "cause": "causes of failures",
    "check": "checks of doctor",
}


def index_lines(pages: Sequence[Page]) -> Iterator[Line]:
    """Every page by its name and title."""
    width = max(len(page.name) for page in pages)
    for kind, heading in _HEADINGS.items():
        yield line(StyledText(heading, "strong"))
        for page in pages:
            if page.kind == kind:
                yield line("  ", padded(page.name, width), "  ", page.title, hang=width + 4)
        yield EMPTY
    yield from next_line("ckptctl explain CODE")


_VERDICTS = {
    Verdict.UNSAFE: "Loading the step could run code or open a file outside it. ckptctl did "
    "neither.",
    Verdict.UNKNOWN: "The step could not be inspected. It may be good or bad.",
    Verdict.CHANGED: "Files were added, removed or changed during the inspection. Try again when "
    "nothing writes to the step.",
    Verdict.CORRUPT: "The contents are wrong: they contradict each other or their checksums.",
    Verdict.INCOMPLETE: "Something is missing: a file, the end of a file, or part of a tensor.",
    Verdict.IN_PROGRESS: "The save is not finished, and a file was written recently. Try again in "
    "a few minutes.",
    Verdict.UNVERIFIABLE: "Nothing proves the step good or bad at the requested level.",
    Verdict.REJECTED: "A person or a job rejected the step.",
    Verdict.SUPERSEDED: "The step belongs to a branch of the run that was abandoned when the job "
    "resumed from an older step.",
    Verdict.COMPLETE: "Everything that the metadata requires is present, as far as the level "
    "checks.",
}


_LOSS_VERDICTS = {
    "discontinuous": "A counter, the data, the weights or the level of the loss is wrong, without "
    "a harmless explanation. Stop the job, reject the step, and resume from another.",
    "suspect": "Something differs that should not, and the logs do not show why. A person has to "
    "decide.",
    "inconclusive": "Nothing contradicts a correct resume, but too little was logged to confirm "
    "it. Wait, or pass more of the logs.",
    "no-jump": "The level of the loss did not jump. A loss curve does not show a lost optimizer, "
    "lost RNG states, or repeated or skipped data; only steps that were logged twice do. After a "
    "clean stop, a canary replay logs some steps twice: `ckptctl loss --canary`.",
    "continuous": "Steps that were logged twice agree: weights, optimizer, RNG states and data "
    "are the same as before.",
}


@dataclass(frozen=True, slots=True)
class Page:
    """One thing that can be explained."""

    name: str
    """The code, verdict, exit code, cause or check."""
    kind: str
    """`finding`, `verdict`, `exit-code`, `cause` or `check`."""
    title: str
    """The meaning in a few words."""
    text: str
    """The page, in Markdown."""
    address: str | None
    """Where the documentation explains it; null where no address of the site is stated."""


def page(name: str) -> Page:
    """The page of a finding code, a verdict, an exit code, a cause or a check of `doctor`.

    Raises `UsageError` for anything else, with the names that come close.
    """
    if name in CODES:
        address = f"ckptctl/pages/{name}.html"
        return Page(name, "finding", CODES[name].title, _text_of(name), address)
    if name in {verdict.value for verdict in Verdict}:
        return _verdict_page(Verdict(name))
    if name in _LOSS_VERDICTS:
        return _loss_verdict_page(name)
    if name.isascii() and name.isdigit() and int(name[:4]) in exit_codes.EXIT_CODES:
        return _exit_code_page(int(name))
    if name in _CAUSES:
        return _cause_page(_CAUSES[name])
    if name in CHECKS:
        return _check_page(name)
    below = [code for code in sorted((*CODES, *CHECKS)) if code.startswith(f"{name}.")]
    close = below or _close_to(name)
    message = f"there is nothing to explain under the name {name!r}"
    if not close:
        raise UsageError(message, next_command="ckptctl explain")
    raise UsageError(
        f"{message}; the codes below it are {listed(below)}"
        if below
        else f"{message}; did you mean {listed(close, 'or')}?",
        next_command=command_line("explain", close[0]),
    )


def all_pages() -> Iterator[Page]:
    """Every page: finding codes, verdicts, exit codes, causes, then checks of `doctor`."""
    for code in sorted(CODES):
        yield page(code)
    for verdict in Verdict:
        yield page(verdict.value)
    for word in _LOSS_VERDICTS:
        yield page(word)
    for number in exit_codes.EXIT_CODES:
        yield page(str(number))
    for cause in _CAUSES.values():
        yield _cause_page(cause)
    for name in CHECKS:
        yield _check_page(name)


def _text_of(code: str) -> str:
    file = resources.files("ckptctl").joinpath("pages").joinpath(f"{code}.md")
    heading, _, rest = file.read_text("utf-8").rstrip("\n").partition("\n")
    return f"{heading}: {CODES[code].title}\n\n{_consequence(code)}\n{rest}"


def _consequence(code: str) -> str:
    severity, verdict = CODES[code].severity.value.capitalize(), CODES[code].verdict
    if code.startswith("loss."):
        return f"{severity}: {_of_loss(code)}."
    if verdict is None:
        return f"{severity}: it does not make a step unusable by itself."
    exit_code = EXIT_DENIED if code == "step.denied" else verdict.exit_code
    return f"{severity}: the step is `{verdict.value}` (`verify` exits with {exit_code})."


def _of_loss(code: str) -> str:
    from ckptctl.loss.verdict import FORCES

    forced = FORCES.get(code)
    if forced is None:
        return "it does not change the verdict about the loss"
    return f"the loss is `{forced.value}` (`loss` exits with {forced.exit_code()})"


def _verdict_page(verdict: Verdict) -> Page:
    codes = sorted(code for code, meaning in CODES.items() if meaning.verdict is verdict)
    exits = f"`ckptctl verify` exits with {verdict.exit_code}."
    address = "docs/design.html#verdicts-selection-exit-codes"
    return _page_of_verdict(verdict.value, _VERDICTS[verdict], exits, codes, address)


def _page_of_verdict(word: str, means: str, exits: str, codes: Sequence[str], address: str) -> Page:
    lines = [f"# {word}", "", means, "", exits]
    lines += ["", "Findings with this verdict:", ""] if codes else []
    lines += [f"- `{code}`: {CODES[code].title}" for code in codes]
    return Page(word, "verdict", means, "\n".join(lines), address)


def _loss_verdict_page(word: str) -> Page:
    from ckptctl.loss.verdict import FORCES, LossVerdict

    verdict = LossVerdict(word)
    exits = f"`ckptctl loss` exits with {verdict.exit_code()}"
    if verdict is LossVerdict.NO_JUMP:
        exits += f", with `--strict` {verdict.exit_code(strict=True)}"
    codes = [code for code, forced in FORCES.items() if forced is verdict]
    address = "docs/loss.html#verdicts"
    return _page_of_verdict(word, _LOSS_VERDICTS[word], f"{exits}.", codes, address)


def _exit_code_page(number: int) -> Page:
    code = exit_codes.EXIT_CODES[number]
    lines = [f"# exit code {number}: {code.title}", "", code.advice]
    lines += ["", f"Retry: {code.retry}."]
    address = "docs/reference.html#exit-codes"
    return Page(str(number), "exit-code", code.title, "\n".join(lines), address)


_CAUSES = {
    domain.name: domain for domain in CLASSES.values() if domain.name not in ("none", "unknown")
}

_RESTARTS = {
    Restart.FREE: "helps, and is not counted against a budget",
    Restart.YES: "helps",
    Restart.ONCE: "can help once; the same failure again is caused by the job",
    Restart.NO: "does not help",
}


def _cause_page(cause: FailureClass) -> Page:
    lines = [f"# {cause.name}: {cause.means}", "", cause.advice, ""]
    lines.append(f"A restart {_RESTARTS[cause.restart]}.")
    lines.append(f"`ckptctl classify --quiet` prints `{cause.domain.value}`.")
    address = "docs/classify.html#what-it-answers"
    return Page(cause.name, "cause", cause.means, "\n".join(lines), address)


def _check_page(name: str) -> Page:
    check = CHECKS[name]
    lines = [f"# {name}: {check.title}", "", check.effect, "", check.fix]
    return Page(name, "check", check.title, "\n".join(lines), "docs/job-scripts.html#the-doctor")


def _published() -> str:
    """The address of the documentation in `project.urls` of `pyproject.toml`; "" without one."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata("ckptctl").get_all("Project-URL", [])
    except PackageNotFoundError:  # a source tree that is not installed
        return ""
    named = (url.partition(", ") for url in urls)
    return next((url for label, _, url in named if label == "Documentation"), "")


def _close_to(name: str) -> list[str]:
    from difflib import get_close_matches

    names = [*CODES, *(verdict.value for verdict in Verdict), *_LOSS_VERDICTS, *_CAUSES, *CHECKS]
    return get_close_matches(name.lower(), names, n=3)
