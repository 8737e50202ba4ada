"""The exit codes: what each means, and what to do.

The help texts, `ckptctl explain NUMBER` and the documents are generated from this
table or compared with it. Codes are added and never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ExitCode(NamedTuple):
    """`title` is the code in a few words; `advice` is what a caller does next.

    `retry` begins with `yes` if the same command may succeed later, else with `no` or
    `not needed`; what helps may follow.
    """

    title: str
    advice: str
    retry: str = "no"


EXIT_CODES: Mapping[int, ExitCode] = {
    0: ExitCode("success", "Continue.", "not needed"),
    1: ExitCode(
        "a bug in ckptctl",
        "Run the command again with `--debug` and report what it prints. Treat the answer as "
        "unknown: do not start fresh.",
    ),
    2: ExitCode(
        "usage or configuration",
        "An argument, an option or a path is wrong, or an extra is not installed. Correct the "
        "command as the message states.",
    ),
    3: ExitCode(
        "success, but another step may be newer",
        "Only `pick --detailed-exitcode` returns it. Resume from the path on standard output; "
        "standard error lists the newer steps and why they were refused.",
        "not needed",
    ),
    10: ExitCode(
        "no step at all: a fresh run",
        "The root does not exist, or never had a usable step. If you expect that, `--allow-fresh` "
        "turns the code into 0, and `--create` creates the root. Otherwise check its path.",
    ),
    11: ExitCode(
        "steps exist, none is usable",
        "Also returned if there are no steps and the root's records do not prove that there never "
        "were any. Never start fresh: page someone. Continue with the next command, which follows "
        "from the reason (`pick --print reason`). `ckptctl scan ROOT` lists every step with its "
        "reason.",
    ),
    20: ExitCode(
        "incomplete",
        "Part of the step was never written or is missing: `ckptctl pick ROOT`.",
        "no; use another step",
    ),
    21: ExitCode(
        "corrupt",
        "The contents of the step are wrong or contradict each other: `ckptctl pick ROOT`. Keep "
        "this one for the investigation.",
        "no; use another step",
    ),
    22: ExitCode(
        "unverifiable",
        "The step may be good, but nothing proves it at the requested level. Request a shallower "
        "level, accept it with `--accept-unverifiable`, or use another step.",
        "no; use another step",
    ),
    23: ExitCode(
        "complete, but required train state is missing",
        "The step loads, but lacks train state that is required. Require less, or use another "
        "step; `ckptctl show STEP` lists what it contains.",
        "no; use another step",
    ),
    24: ExitCode(
        "cannot be loaded at the requested world size",
        "The step loads only with the number of ranks that wrote it. Start that many ranks, or "
        "convert the checkpoint with the framework that wrote it.",
    ),
    25: ExitCode(
        "unsafe",
        "Loading the step could run code or open a file outside it. ckptctl did neither. Do not "
        "load it with any tool; report it.",
    ),
    26: ExitCode(
        "changed during the inspection, or a save is in progress",
        "Try again in a few minutes. `pick` never ends with this code: it skips such a step.",
        "yes",
    ),
    27: ExitCode(
        "rejected or superseded",
        "A mark excludes the step, or the run resumed from an older one. Use another step.",
        "no; use another step",
    ),
    28: ExitCode(
        "the two steps differ",
        "Only `diff` returns it: names, shapes, dtypes or values differ. Both steps may be good; "
        "the output lists the differences.",
    ),
    29: ExitCode(
        "faults found in a script, an environment or a storage",
        "Only `doctor` returns it; warnings and notes end with 0. The output states each fault "
        "and its correction.",
    ),
    30: ExitCode(
        "the loss is not continuous across the resume",
        "The resume was not correct, or the step is not good. Stop the job, reject the step "
        "(`ckptctl reject STEP`), then choose an older one (`ckptctl pick ROOT`). From `data`: "
        "samples were repeated or skipped.",
        "no; fall back",
    ),
    31: ExitCode(
        "not enough data to decide whether the loss is continuous",
        "Wait for more logged steps and run the command again. Log every step around saves, and "
        "keep the logs from before the failure. From `rerun` and `data`: the replays, or the "
        "ledger, do not decide; the message states what is missing.",
        "yes, with more logged steps",
    ),
    32: ExitCode(
        "suspect: the loss may not be continuous",
        "Check the table and the plot before the job continues for long.",
        "no; check",
    ),
    33: ExitCode(
        "the job does not survive a fault of the drill",
        "Only `drill` returns it. The report names each fault and what happened.",
        "yes, after a change of the job",
    ),
    34: ExitCode(
        "a suspicious value comes from the hardware of these nodes",
        "Only `rerun` returns it. Take the nodes out of the pool, and resume elsewhere from a "
        "step before the value.",
        "yes, on other nodes",
    ),
    35: ExitCode(
        "done, with something that a person accepted against what was found",
        "Only `runbook run` returns it: somebody accepted lost train state, a suspect loss or a "
        "lower throughput. The last line and the transcript name who and why.",
        "not needed",
    ),
    36: ExitCode(
        "no newer step was proven for several save intervals",
        "Only `watch --once` returns it. The job saves nothing that is whole: look at its log, at "
        "the space on the storage, and at `ckptctl scan ROOT`.",
        "not needed",
    ),
    75: ExitCode(
        "the storage did not answer",
        "Nothing is known about the step, good or bad. Too little memory for the inspection has "
        "the same code. Try again later; never treat it as 'no checkpoint'.",
        "yes",
    ),
    77: ExitCode(
        "access denied",
        "The storage denied access. Check the credentials and permissions of the account that "
        "runs the job.",
    ),
    93: ExitCode(
        "do not restart",
        "A newer attempt owns the root, the failure would recur, or a person decided against it. "
        "From `rerun`: the job itself computes the suspicious value, on any node. Investigate "
        "before starting anything.",
    ),
    94: ExitCode(
        "wait for capacity",
        "Too few nodes are available for the job. Nothing is wrong with it: start it again when "
        "there are more. A job script requeues here.",
        "yes, later",
    ),
    129: ExitCode("the terminal was closed (signal 1)", "No partial file was left.", "yes"),
    130: ExitCode("interrupted by Ctrl-C (signal 2)", "No partial file was left.", "yes"),
    141: ExitCode(
        "the reader of the output closed the pipe (signal 13)",
        "Usual with `| head`. The output is incomplete: do not act on it.",
        "yes",
    ),
    143: ExitCode("ended by signal 15", "No partial file was left.", "yes"),
}
