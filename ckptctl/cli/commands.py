"""The commands: names, one line of help for each, and the modules that hold them.

A command is imported only when it is called: `ckptctl pick` stands in front of every
training job, and the list of commands needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

SUMMARIES: Mapping[str, str] = {
    "scan": "List the steps of a root with their verdicts and the step that pick would choose.",
    "verify": "Inspect one step and report every finding.",
    "pick": "Choose the step to resume from.",
    "show": "Show the contents of a step: tensors, sizes, ranks, and what a resume restores.",
    "seal": "Verify a step and record its digests.",
    "watch": "Verify and seal each step that a job finishes, from a process beside it.",
    "reject": "Reject a step, so that nothing resumes from it.",
    "accept": "Lift a rejection, so that the step may be used again.",
    "pin": "Pin a step, so that retention keeps it.",
    "prune": "Remove old steps that are no longer needed.",
    "preflight": "Check that a job can start here and now, and choose its step.",
    "run": "Run a job, and restart it after failures within a budget.",
    "history": "Show the attempts of runs, and how much of their time was training that is kept.",
    "data": "Show which samples of each epoch were trained once, repeated or skipped.",
    "drill": "Inject faults into your own job, on a copy of its newest step, and grade how "
    "it survives.",
    "rerun": "Replay a suspicious step on the same and on other nodes, to find faulty hardware.",
    "cost": "Estimate what a failure of a run costs, and the best interval between saves.",
    "reshard": "Rewrite a step for another world size in constant memory.",
    "convert": "Convert a step to one torch.save file or to safetensors, or either of them to "
    "a step.",
    "diff": "Compare two steps: entries, shapes, dtypes, values.",
    "runbook": "List, show and run runbooks.",
    "classify": "Classify a failure by the logs of a job, and print what to do.",
    "loss": "Check whether the loss is continuous across a resume.",
    "doctor": "Find mistakes in a job script, an environment or a storage.",
    "explain": "Explain a code or word that ckptctl prints, and what to do about it.",
}
"""The first line of each command's help, in the order in which help lists the commands."""

COMMANDS = tuple(SUMMARIES)

# A command is a function of its name in the module of its name, but for these.
_MODULES = {"reject": "marks", "accept": "marks", "pin": "marks"}


class Command(NamedTuple):
    """A command, and what the end of its help lists."""

    function: Callable[..., int]
    examples: tuple[str, ...]
    exit_codes: tuple[int, ...]


def load(name: str) -> Command:
    """The command called `name`, one of `COMMANDS`."""
    module = import_module(f"ckptctl.cli.{_MODULES.get(name, name)}")
    examples = module.EXAMPLES[name] if name in _MODULES else module.EXAMPLES
    return Command(getattr(module, name), examples, module.EXIT_CODES)
