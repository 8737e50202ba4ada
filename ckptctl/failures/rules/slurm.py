"""What do SLURM's daemons, `srun` and `sacct` say when a job ends?

Forms of SLURM 20 to 25: messages of `slurmstepd`, `srun` and `slurmctld`, states in the
output of `sacct`, `squeue` and `scontrol show job`. Exit codes are the question of `exit_codes`.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

# A state as scontrol (`JobState=`), a column of sacct, or a sentence gives it.
_STATE = (
    r"(?:\bJobState=|\bState=|\|\s*|^\d[\w.+\[\]-]*\s+(?:\S+\s+){0,6}?|\bstate[:=]? ?|"
    r"\bReason=)"
)

RULES = (
    Rule(
        "slurm.time-limit",
        "walltime",
        Role.CAUSE,
        (
            "time limit",
            "timeout",
            "timelimit",
        ),
        (
            "DUE TO TIME LIMIT",
            _STATE + r"TIMEOUT(?:\b|\+)",
            "(?<!NCCL_)JobState=TIMEOUT",
            "Time limit exhausted",
            r"Reason=TimeLimit\b",
            r"step \S+ (?:has )?exceeded (?:its )?time ?limit",
        ),
        "the time limit of the job was over",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.preempted",
        "preemption",
        Role.CAUSE,
        ("preempt",),
        (
            "DUE TO PREEMPTION",
            _STATE + r"PREEMPTED(?:\b|\+)",
            "[Pp]reempted job",
            "Preempt(?:ing|ed) .*[Jj]ob",
        ),
        "the scheduler took the nodes for another job",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.node-failure",
        "infra-node",
        Role.CAUSE,
        (
            "node failure",
            "node_fail",
            "node fail",
            "boot_fail",
            "launch failed",
            "not responding",
            "nodefail",
            "node down",
        ),
        (
            "DUE TO NODE FAILURE",
            r"CANCELLED AT \S+ DUE TO NODE FAIL",
            _STATE + r"(?:NODE_FAIL|BOOT_FAIL)(?:\b|\+)",
            (
                r"^(?:srun: |slurmctld: |salloc: )?(?:error: "
                r")?Nodes? (?P<host_2>[\w.,\[\]-]+) (?:are|"
                "is)? ?(?:failed|not responding|DOWN)"
            ),
            r"Node failure on (?P<host>[\w.,\[\]-]+)",
            r"Reason=NodeDown\b",
            r"Job \S+ (?:requeue|killed).*node failure",
            r"error: Nodes? (?P<host_3>[\w.,\[\]-]+) not responding, setting DOWN",
        ),
        "a node of the job failed",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.oom",
        "job-oom",
        Role.CAUSE,
        (
            "memory limit",
            "out_of_me",
            "out of memory",
            "out_of_memory",
            "oom_kill",
            "oom-kill",
            "oom event",
            "exceeded memory limit",
            "exceeded job memory",
        ),
        (
            r"\bexceeded (?:job |step )?memory limit",
            r"tasks? [\d,-]+: Out Of Memory",
            r"\bOUT_OF_ME(?:MO?R?)?\+",
            r"error: Detected [1-9]\d* oom[_-]kill event",
            r"task \S+: Out Of Memory",
            _STATE + r"OUT_OF_MEMORY(?:\b|\+)",
            "[Ee]xceeded (?:job|step) memory limit",
            (
                "Some of (?:your processes|the step tasks) (?:may )?have been killed by the cgroup "
                "out-of-memory handler"
            ),
            "task/cgroup: .*oom-kill",
            r"StepId=\S+ hit memory(?:\+swap)? limit",
            "OOM Killed",
        ),
        "a process was killed for using more memory than the job asked for",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.deadline",
        "job-config",
        Role.CAUSE,
        ("deadline",),
        (
            _STATE + r"DEADLINE(?:\b|\+)",
            "DUE TO DEADLINE",
        ),
        "the job could not end before its deadline",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.requeued",
        "preemption",
        Role.ROOT,
        ("requeue",),
        (
            r"CANCELLED AT \S+ DUE TO JOB REQUEUE",
            _STATE + r"REQUEUED?(?:\b|\+)",
            "DUE TO REQUEUE",
        ),
        "the job was put back into the queue",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.cancelled",
        "user",
        Role.ROOT,
        (
            "cancelled",
            "scancel",
        ),
        (
            r"CANCELLED AT \S+ by ",
            _STATE + r"CANCELLED by \d+(?:\b|\+)",
            (
                r"\*\*\* JOB \S+ (?:\bON (?P<host>[\w.,\[\]-]+) "
                r")?CANCELLED AT \S+ (?:\*\*\*|DUE to "
                "SIGNAL)"
            ),
            r"_slurm_rpc_kill_job\S* (?:REQUEST_KILL_JOB )?.*\buid=? ?[1-9]\d*",
            r"Job \S+ was cancelled by user",
        ),
        "the job was cancelled by hand",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.step-cancelled",
        "unknown",
        Role.CASCADE,
        ("cancelled",),
        (r"\*\*\* STEP \S+ (?:\bON (?P<host>[\w.,\[\]-]+) )?CANCELLED AT",),
        "the rest of the step was ended",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.cancelled-state",
        "user",
        Role.SUSPECT,
        ("cancelled",),
        (_STATE + r"CANCELLED(?:\b|\+)",),
        "the job was cancelled",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.task-prolog",
        "infra-node",
        Role.ROOT,
        (
            "prolog",
            "epilog",
            "launch failure",
            "node configuration",
            "reasonlaunch",
            "launch_failed",
            "launch failed",
        ),
        (
            "(?:[Pp]rolog|TaskProlog) (?:failed|error|exited)",
            "job launch failure",
            "Prolog launch failure",
            "JobLaunchFailure",
            "launch failed requeued held",
            "Reason=RaisedSignal:53",
        ),
        "the node could not start the job",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.launch",
        "job-config",
        Role.ROOT,
        (
            "slurmstepd",
            "srun",
            "sbatch",
            "invalid",
            "unable",
        ),
        (
            r"slurmstepd: error: execve\(\): \S+: No such file",
            "sbatch: error: (?:Batch job submission failed|invalid)",
            (
                "srun: error: Unable to create step.*(?:Invalid|More processors|Requested node "
                "configuration|Memory)"
            ),
            "srun: error: (?:Unable to allocate resources: )?(?:Invalid|Requested node config)",
            "slurmstepd: error: couldn't chdir",
        ),
        "the scheduler could not start what the job script asks for",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.task-segfault",
        "job-code",
        Role.SUSPECT,
        (
            "segmentation fault",
            "core dumped",
            "illegal instruction",
            "floating point exception",
        ),
        (
            (
                r"srun: error: (?P<host>[\w.-]+): tasks? "
                r"(?P<rank>\d+)[\d,-]*: (?:Segmentation fault|"
                "Illegal instruction|Floating point)"
            ),
        ),
        "a task ended by a fault of its own",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.task-bus-error",
        "infra-storage",
        Role.SUSPECT,
        ("bus error",),
        (r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d+)[\d,-]*: Bus error",),
        "a task ended by a bus error: mostly a file that was cut off under a mapping",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.task-killed",
        "unknown",
        Role.SUSPECT,
        (": killed",),
        (r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d+)[\d,-]*: Killed",),
        "a task was killed by SIGKILL, and not by itself",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.task-other",
        "unknown",
        Role.CASCADE,
        (
            "srun:",
            "slurmstepd",
        ),
        (
            (
                r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d+)[\d,-]*: (?:Exited with exit "
                "code|Terminated|Aborted)"
            ),
            "srun: (?:Job step aborted|Terminating|launch/slurm: _step_signal)",
            "srun: Force Terminated",
            r"slurmstepd: error: Step \S+ (?:hit|was) .*terminated",
        ),
        "tasks of the step ended",
        quotable=True,
        level=20,
    ),
    Rule(
        "slurm.comm",
        "infra-fabric",
        Role.SUSPECT,
        (
            "slurm_receive_msg",
            "communication connection failure",
            "zero bytes were",
            "unable to contact slurm",
            "slurm_persist",
        ),
        (
            (
                "srun: error: .*(?:Communication connection failure|Zero Bytes were transmitted|"
                "Socket timed out|[Uu]nable to contact slurm controller)"
            ),
        ),
        "SLURM's daemons did not reach each other",
        quotable=True,
        level=20,
    ),
)
