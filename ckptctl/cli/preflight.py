"""`ckptctl preflight`: check in a job script that the job can start, and choose its step."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import ckptctl
from ckptctl.cli.config import parse_toml, read_small
from ckptctl.cli.options import (
    AllowFreshOpt,
    CreateOpt,
    OfStep,
    OptionalRootOpt,
    RootsArg,
)
from ckptctl.cli.output import Output, document_of, process_group
from ckptctl.cli.rendering import Line, Style, StyledText, line, next_line, padded, refused_lines
from ckptctl.errors import OptionError, OwnFileUnreadable, UsageError
from ckptctl.formats.own.contract import MAX_CONTRACT_BYTES, Terms, terms_of
from ckptctl.formats.own.files import parsed
from ckptctl.options import Parameter, PickPolicy, StorageOptions
from ckptctl.preflight_checks.nodes import PATIENCE, Launcher, report_from_here
from ckptctl.preflight_checks.results import CheckOutcome, Preflight

EXAMPLES = (
    "CKPT=$(ckptctl preflight /shared/ckpt/run-1234) || exit $?",
    "srun --ntasks-per-node=1 ckptctl preflight /shared/ckpt/run-1234 --probe-storage",
    "ckptctl preflight /shared/ckpt/run-1234 --world-size 56",
)
EXIT_CODES = (0, 2, 10, 11, 75, 77)


def preflight(
    roots: RootsArg,
    optional_root: OptionalRootOpt = None,
    allow_fresh: AllowFreshOpt = False,
    create: CreateOpt = False,
    room_for: Annotated[
        int,
        Parameter(
            "--room-for N",
            "How many more steps must fit; 0 for a job that saves nothing.",
            min=0,
            setting=True,
        ),
    ] = 1,
    probe_storage: Annotated[
        bool,
        Parameter(
            "--probe-storage",
            "Write up to 64 MiB to a new folder under ROOT/.ckptctl, read them back, "
            "compare, and remove them; report what damaged steps have in common.",
        ),
    ] = False,
    log: Annotated[
        list[str] | None,
        Parameter(
            "--log FILE",
            "A training log of the job that died, oldest first: count the steps, tokens "
            "and seconds after the chosen step, which are repeated.",
            common=False,
        ),
    ] = None,
    contract: Annotated[
        str | None,
        Parameter(
            "--contract FILE",
            "What the job states of itself (TOML or JSON): compare it with the contract of the "
            "chosen step, and stop where a term differs.",
            common=False,
        ),
    ] = None,
    accept_drift: Annotated[
        list[str] | None,
        Parameter(
            "--accept-drift TERM",
            "A term of the contract that may differ. May be given several times.",
            common=False,
        ),
    ] = None,
    launcher: Annotated[
        list[str] | None,
        Parameter(
            "--launcher COMMAND",
            "Also check the storage on the nodes of the job, with this command: 'srun "
            "--jobid 4711 --overlap --ntasks-per-node=1', 'kubectl exec worker-0 -- "
            "ckptctl'. It is run without a shell. May be given several times.",
        ),
    ] = None,
    node_report: Annotated[
        str | None,
        Parameter(
            "--node-report STEP",
            "Print only what this node sees of the roots and of STEP (none: of no "
            "step), as a line of JSON; --launcher uses it.",
            hidden=True,
        ),
    ] = None,
    node_probe: Annotated[
        str | None,
        Parameter(
            "--node-probe TOKEN",
            "With --node-report: compare the files of this probe, and write some.",
            hidden=True,
        ),
    ] = None,
    print_capacity: Annotated[
        bool,
        Parameter(
            "--print-capacity",
            "Print on standard output how the number of ranks compares with that of the "
            "save, instead of the path.",
            hidden=True,
        ),
    ] = False,
    *,
    policy: PickPolicy,
    requirements: OfStep,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Check that a job can start here and now, and choose its step.

    Chooses as pick does, then checks whether the storage can be read and written, and whether
    the ranks fit. Prints the path on standard output, and one line per check on standard error.
    Started on every node by srun or torchrun, the nodes compare what they see; one of them
    prints, and all end with the same code. With --launcher one process starts the others; a
    storage that only this node sees ends it with 75. With --quiet standard error stays empty
    unless a check failed. --print-capacity prints one word for a script: as-saved, smaller,
    larger or unknown.
    """
    if node_report is not None:
        step = "" if node_report == "none" else node_report
        out.document_line(partial(report_from_here, [*roots], step, node_probe, storage))
        return 0
    with ExitStack() as stack:
        group = process_group(stack, out)
        launchers = parse_launchers(launcher, storage.timeout_s)
        for started in launchers if group.is_first else ():
            limit = f"at most {started.timeout_s:,.0f} s"
            out.say(line(f"waiting for the processes that {started.words[0]} starts, {limit}"))
        found = ckptctl.preflight(
            *roots,
            optional_roots=optional_root or (),
            allow_fresh=allow_fresh,
            create=create,
            room_for=room_for,
            probe_storage=probe_storage,
            logs=log or (),
            contract=None if contract is None else stated_in(contract),
            accept_drift=accept_drift or (),
            launchers=launchers,
            group=group,
            policy=policy,
            requirements=requirements,
            storage=storage,
        )
    taken = found.capacity.value if print_capacity else found.path
    out.answer(
        document_of("preflight", found),
        lambda: preflight_lines(found),
        bare=() if found.path is None or taken is None else (taken,),
        bare_only=True,
        has_failed=bool(found.exit_code),
    )
    return found.exit_code


def stated_in(path: str) -> Terms:
    """The terms that a file of TOML, or of JSON by its name, states."""
    error = partial(OptionError, "--contract")
    try:
        data, _ = read_small(path, MAX_CONTRACT_BYTES, error)
        if path.endswith(".json"):
            return terms_of(parsed(data, MAX_CONTRACT_BYTES, numbers="finite"))
        return terms_of(parse_toml(path, data, MAX_CONTRACT_BYTES, error))
    except OptionError:
        raise
    except (OwnFileUnreadable, UsageError) as cause:
        raise error(f"{path}: {cause.message}") from cause


def parse_launchers(given: list[str] | None, timeout_s: float) -> tuple[Launcher, ...]:
    """The commands in `--launcher`, taken apart as a shell would, and run by none."""
    launchers = []
    for text in given or ():
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise OptionError("--launcher", f"{text!r}: {error}") from error
        if not words:
            raise OptionError(
                "--launcher", "is empty", instead="--launcher 'srun --ntasks-per-node=1'"
            )
        launchers.append(Launcher(words, PATIENCE * timeout_s))
    return tuple(launchers)


_STYLES: dict[CheckOutcome, Style] = {
    CheckOutcome.OK: "good",
    CheckOutcome.WARNING: "warn",
    CheckOutcome.FAILED: "bad",
}


def preflight_lines(found: Preflight) -> list[Line]:
    """The answer, one line for each check, why newer steps were refused, what is next."""
    if found.exit_code:
        lines = [line(StyledText("error:", "bad"), f" {found.message}", hang=2)]
    else:
        lines = [line(StyledText(f"ready: {found.message}", "good"), hang=2)]
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        word = padded(check.outcome.value, 7, _STYLES[check.outcome])
        message = f"  {check.message}"
        lines.append(line("  ", word, "  ", padded(check.name, width), message, hang=13 + width))
    advice = next((one.next_command for one in found.checks if one.next_command), None)
    return [*lines, *refused_lines(found.pick), *next_line(found.next_command or advice)]
