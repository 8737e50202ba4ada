"""The classes of failure, and the action for each.

The one table of classes: whose fault, what to do, whether a restart helps. Which
evidence leads to a class is the question of `rules`, which of several wins that of
`deciding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Domain(str, Enum):
    """Whose failure it is: the first question of a recovery."""

    INFRASTRUCTURE = "infrastructure"
    JOB = "job"
    STOPPED = "stopped"
    NONE = "none"
    UNKNOWN = "unknown"


class Action(str, Enum):
    """What is to be done before, or instead of, the next start."""

    DRAIN = "drain"
    CHECK_STORAGE = "check-storage"
    FIX = "fix"
    FALL_BACK = "fall-back"
    RESUME = "resume"
    RESUME_ELSEWHERE = "resume-elsewhere"
    WAIT = "wait"
    LOOK = "look"
    NOTHING = "nothing"


class Restart(str, Enum):
    """Whether starting again may help, without a person in between.

    `free` is a start that is not to be counted against a budget of restarts; `once`
    is a single one, since the same failure twice from the same step is the job's.
    """

    FREE = "free"
    YES = "yes"
    ONCE = "once"
    NO = "no"


@dataclass(frozen=True, slots=True)
class FailureClass:
    """What a class of failures means, and what to do about it, in sentences."""

    name: str
    domain: Domain
    action: Action
    restart: Restart
    means: str
    advice: str


_ALL = (
    FailureClass(
        "infra-node",
        Domain.INFRASTRUCTURE,
        Action.DRAIN,
        Restart.YES,
        "a node or one of its devices failed",
        "Take the node out of the pool first, then resume elsewhere from the newest verified step.",
    ),
    FailureClass(
        "infra-fabric",
        Domain.INFRASTRUCTURE,
        Action.DRAIN,
        Restart.YES,
        "a link between nodes or devices failed",
        "Resume; when the same pair of nodes or the same port fails again, drain it.",
    ),
    FailureClass(
        "infra-storage",
        Domain.INFRASTRUCTURE,
        Action.CHECK_STORAGE,
        Restart.ONCE,
        "the storage failed, is full, or did not answer",
        "Look at the storage from the nodes of the job before resuming; verify the newest step "
        "byte by byte.",
    ),
    FailureClass(
        "job-code",
        Domain.JOB,
        Action.FIX,
        Restart.ONCE,
        "the program failed",
        "Fix the code: a resume meets the same bug again.",
    ),
    FailureClass(
        "job-config",
        Domain.JOB,
        Action.FIX,
        Restart.NO,
        "the job was configured so that it cannot run",
        "Correct the configuration, the environment or the job script.",
    ),
    FailureClass(
        "job-data",
        Domain.JOB,
        Action.FIX,
        Restart.NO,
        "the training data failed",
        "Repair or skip the sample: a resume reads it again.",
    ),
    FailureClass(
        "job-oom",
        Domain.JOB,
        Action.FIX,
        Restart.ONCE,
        "memory ran out",
        "Use less memory (a smaller micro-batch, more sharding, fewer workers) or ask for more.",
    ),
    FailureClass(
        "job-divergence",
        Domain.JOB,
        Action.FALL_BACK,
        Restart.ONCE,
        "the numbers diverged",
        "Do not resume from the newest step: take one from before the numbers went bad, on other "
        "nodes if it may be a device.",
    ),
    FailureClass(
        "bad-checkpoint",
        Domain.JOB,
        Action.FALL_BACK,
        Restart.YES,
        "the checkpoint could not be loaded",
        "Verify the step that was loaded, and resume from an older one if it is damaged.",
    ),
    FailureClass(
        "preemption",
        Domain.STOPPED,
        Action.RESUME,
        Restart.FREE,
        "the job was told to make room",
        "Resume; nothing is broken.",
    ),
    FailureClass(
        "walltime",
        Domain.STOPPED,
        Action.RESUME,
        Restart.FREE,
        "the time that the job may take was over",
        "Submit it again; nothing is broken.",
    ),
    FailureClass(
        "user",
        Domain.STOPPED,
        Action.WAIT,
        Restart.NO,
        "somebody stopped the job",
        "Ask who did, and why, before it is started again.",
    ),
    FailureClass(
        "hang",
        Domain.UNKNOWN,
        Action.LOOK,
        Restart.YES,
        "ranks waited for one that did not come",
        "Find the rank that did not come: dumps of the flight recorder (`--flight-recorder`), or "
        "py-spy on each node. Then resume; the same collective twice is an error of the job.",
    ),
    FailureClass(
        "none",
        Domain.NONE,
        Action.NOTHING,
        Restart.NO,
        "nothing failed",
        "An end with exit code 0 does not prove that training is finished: look at the last step.",
    ),
    FailureClass(
        "unknown",
        Domain.UNKNOWN,
        Action.LOOK,
        Restart.ONCE,
        "nothing says why",
        "Collect the logs of all ranks, the kernel log of each node (`dmesg -T`), the scheduler's "
        "record (`sacct -P`, `kubectl describe`), and for a hang the dumps of the flight recorder.",
    ),
)

CLASSES: Mapping[str, FailureClass] = {each.name: each for each in _ALL}
"""Every class by its name, in the order in which the documents list them."""
