"""The classes of failure, and the action for each.

Each class states the domain of the failure, what to do, and whether a restart can help.
`rules` maps evidence to classes; `deciding` chooses among several.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from ckptctl.data_classes import dataclass


class Domain(str, Enum):
    """What failed: the infrastructure, the job, or neither."""

    INFRASTRUCTURE = "infrastructure"
    JOB = "job"
    STOPPED = "stopped"
    NONE = "none"
    UNKNOWN = "unknown"


class Action(str, Enum):
    """What to do before, or instead of, the next start."""

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
    """Whether a restart without human action can help.

    `free` does not count against a restart budget; `once` allows a single restart, because
    the same failure twice from the same step is caused by the job.
    """

    FREE = "free"
    YES = "yes"
    ONCE = "once"
    NO = "no"


@dataclass(frozen=True, slots=True)
class FailureClass:
    """The meaning of a class of failures, and what to do about it."""

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
        "Remove the node from the pool first, then resume elsewhere from the newest verified step.",
    ),
    FailureClass(
        "infra-fabric",
        Domain.INFRASTRUCTURE,
        Action.DRAIN,
        Restart.YES,
        "a link between nodes or devices failed",
        "Resume; if the same pair of nodes or the same port fails again, drain it.",
    ),
    FailureClass(
        "infra-storage",
        Domain.INFRASTRUCTURE,
        Action.CHECK_STORAGE,
        Restart.ONCE,
        "the storage failed, is full, or did not answer",
        "Check the storage from the nodes of the job before resuming, and verify the newest step "
        "at level content.",
    ),
    FailureClass(
        "job-code",
        Domain.JOB,
        Action.FIX,
        Restart.ONCE,
        "the program failed",
        "Fix the code: a resume would hit the same bug.",
    ),
    FailureClass(
        "job-config",
        Domain.JOB,
        Action.FIX,
        Restart.NO,
        "the job is misconfigured and cannot run",
        "Correct the configuration, the environment or the job script.",
    ),
    FailureClass(
        "job-data",
        Domain.JOB,
        Action.FIX,
        Restart.NO,
        "the training data failed",
        "Repair or skip the sample: a resume would read it again.",
    ),
    FailureClass(
        "job-oom",
        Domain.JOB,
        Action.FIX,
        Restart.ONCE,
        "out of memory",
        "Use less memory (a smaller micro-batch, more sharding, fewer workers) or request more.",
    ),
    FailureClass(
        "job-divergence",
        Domain.JOB,
        Action.FALL_BACK,
        Restart.ONCE,
        "training diverged",
        "Do not resume from the newest step: resume from one before the divergence, on other "
        "nodes if a device may be the cause.",
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
        "the job was preempted",
        "Resume; nothing is broken.",
    ),
    FailureClass(
        "walltime",
        Domain.STOPPED,
        Action.RESUME,
        Restart.FREE,
        "the time limit of the job was reached",
        "Submit the job again; nothing is broken.",
    ),
    FailureClass(
        "user",
        Domain.STOPPED,
        Action.WAIT,
        Restart.NO,
        "the job was stopped manually",
        "Find out who stopped it and why before restarting.",
    ),
    FailureClass(
        "hang",
        Domain.UNKNOWN,
        Action.LOOK,
        Restart.YES,
        "ranks waited for a rank that never joined",
        "Find the rank that never joined: dumps of the flight recorder (`--flight-recorder`), or "
        "py-spy on each node. Then resume; the same collective twice points to the job.",
    ),
    FailureClass(
        "none",
        Domain.NONE,
        Action.NOTHING,
        Restart.NO,
        "nothing failed",
        "Exit code 0 does not prove that training is finished: check the last step.",
    ),
    FailureClass(
        "unknown",
        Domain.UNKNOWN,
        Action.LOOK,
        Restart.ONCE,
        "the logs do not show a cause",
        "Collect the logs of all ranks, the kernel log of each node (`dmesg -T`), the scheduler's "
        "record (`sacct -P`, `kubectl describe`), and for a hang the dumps of the flight recorder.",
    ),
)

CLASSES: Mapping[str, FailureClass] = {each.name: each for each in _ALL}
"""Every class by name, in the order of the documentation."""
