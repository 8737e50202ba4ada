"""The exit codes: what each means, and what to do.

The one table behind the help texts, `ckptctl explain NUMBER` and the guard that
keeps the documents in step. Codes are only ever added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ExitCode(NamedTuple):
    """`title` is the code in a few words; `advice` says what a caller does next.

    `retry` is what helps: `yes` (the same command later), `no`, or what else.
    """

    title: str
    advice: str
    retry: str = "no"


EXIT_CODES: Mapping[int, ExitCode] = {
    0: ExitCode("yes", "Go on.", "not needed"),
    1: ExitCode(
        "a bug in ckptctl",
        "Run the command again with `--debug` and report what it prints. Treat the answer as "
        "unknown: do not start fresh.",
    ),
    2: ExitCode(
        "usage or configuration",
        "An argument, an option or a path is wrong, or an extra is not installed; the message "
        "says which. Correct the command.",
    ),
    3: ExitCode(
        "yes, but an older step than the newest",
        "Only `pick --detailed-exitcode` gives it. Resume from the path on standard output, and "
        "read on standard error why newer steps were refused.",
        "not needed",
    ),
    10: ExitCode(
        "no step at all: a fresh run",
        "The storage answered, and no step was ever usable in the root, or the root does not "
        "exist. Start from the beginning if that is what you expect (`--allow-fresh` turns it into "
        "0, and with `--create` makes a root that does not exist); if not, the root is not the one "
        "you mean.",
    ),
    11: ExitCode(
        "steps exist, none is usable",
        "Or none is there, and the record of the root does not prove that none ever was. Never "
        "start fresh: page someone. The message names the newest step that is sound at the "
        "level asked for, or says that there is none; `ckptctl runbook run storage-corruption "
        "ROOT` leads on, and `ckptctl scan ROOT` shows every step with its reason.",
    ),
    20: ExitCode(
        "incomplete",
        "Part of the step was never written, or is gone. Use another step: `ckptctl pick ROOT`.",
        "use another step",
    ),
    21: ExitCode(
        "corrupt",
        "What is there contradicts itself. Use another step: `ckptctl pick ROOT`; keep this one "
        "for whoever looks into the cause.",
        "use another step",
    ),
    22: ExitCode(
        "unverifiable",
        "The step may be good, but nothing in it proves that at the level asked for. Ask for a "
        "shallower level, or use another step.",
        "use another step",
    ),
    23: ExitCode(
        "whole, but required train state is missing",
        "The step loads, but lacks something that `--require` asked for. Require less, or use "
        "another step; `ckptctl show STEP` lists what is in it.",
        "use another step",
    ),
    24: ExitCode(
        "cannot be loaded at the world size asked for",
        "The format is bound to the number of ranks that wrote it. Start that many ranks, or "
        "convert the checkpoint with the framework that wrote it.",
    ),
    25: ExitCode(
        "unsafe",
        "The step asks for code to run, or for a file outside itself. Nothing of it was run or "
        "read. Do not load it with anything; report it.",
    ),
    26: ExitCode(
        "changed while being looked at, or a save in flight",
        "Look again in a few minutes. Only `verify` gives it; `pick` passes such a step over.",
        "yes",
    ),
    27: ExitCode(
        "rejected or superseded",
        "Someone, or an older branch of the run, has ruled this step out. Use another step.",
        "use another step",
    ),
    28: ExitCode(
        "the two steps differ",
        "Only `diff` gives it: names, shapes, dtypes or values are not the same. Both steps may be "
        "good; the answer says in what they differ.",
    ),
    30: ExitCode(
        "the loss is not continuous across the resume",
        "The resume was not correct, or the step is not good. Stop the job; `ckptctl reject STEP` "
        "with the reason, then `ckptctl pick ROOT` for the next older step.",
        "fall back",
    ),
    31: ExitCode(
        "not enough data to say whether the loss continued",
        "Wait for more logged steps and ask again, or log every step around saves and keep the "
        "log of before the failure.",
        "wait",
    ),
    32: ExitCode(
        "suspect: the loss may not be continuous",
        "Look at the table and the picture before the job runs on for long.",
        "look",
    ),
    75: ExitCode(
        "the storage did not answer",
        "Nothing is known about the step, good or bad; too little memory to look ends so, too. "
        "Try again later; never take it for 'no checkpoint'.",
        "yes",
    ),
    77: ExitCode(
        "access denied",
        "The storage answered that you may not. Check the credentials and the permissions of the "
        "account that runs the job.",
    ),
    93: ExitCode(
        "do not restart",
        "A newer attempt holds the root, what ended the job comes again, or a person said no. "
        "Look before anything is started.",
    ),
    129: ExitCode("its terminal was closed (signal 1)", "No file was left half written.", "yes"),
    130: ExitCode("interrupted by Ctrl-C (signal 2)", "No file was left half written.", "yes"),
    141: ExitCode(
        "the reader of the output went away (signal 13)",
        "Usual behind `| head`. The answer was not delivered: never act on it.",
        "yes",
    ),
    143: ExitCode("ended by signal 15", "No file was left half written.", "yes"),
}
