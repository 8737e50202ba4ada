"""What do Kubernetes and its container runtimes say when a pod ends?

Reasons of container states, pods, nodes and jobs as `kubectl describe`, `kubectl get -o
yaml|json` and events print them (1.24 to 1.34), and the operators above: JobSet, Kubeflow,
Kueue, Volcano.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

# A reason as YAML, JSON, the columns of `kubectl get` and events give it.
_REASON = (
    r"(?:[\x22']?[Rr]eason[\x22']?\s*[:=]\s*[\x22']?|^(?:Warning|Normal)\s+|\s\s+|"
    r"\S+\s+(?:Warning|Normal)\s+)"
)

RULES = (
    Rule(
        "kubernetes.oom",
        "job-oom",
        Role.CAUSE,
        (
            "oomkill",
            "systemoom",
        ),
        (
            _REASON + r"(?:OOMKilled|OOMKilling)\b",
            r"\d\s+OOMKilled\s+\d",
            r"container \S+ was OOM ?[Kk]illed",
            r"^OOMKilled\b",
            "terminated: OOMKilled",
            "status (?:is )?OOMKilled",
            r"\(OOMKilled\)",
        ),
        "a container was killed for using more memory than its limit",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.preempted",
        "preemption",
        Role.CAUSE,
        (
            "disruptiontarget",
            "preempt",
            "spot",
            "evictionbyevictionapi",
            "deletionbytaintmanager",
            "deletionbypodgc",
            "rebalance",
            "maintenance",
        ),
        (
            "DisruptionTarget",
            "PreemptionByScheduler",
            "EvictionByEvictionAPI",
            _REASON + r"(?:Preempted|Preempting|EvictedDueToPodsReadyTimeout|WorkloadPreempted)\b",
            "Preempted (?:by|in order to)",
            "[Ss]pot (?:instance )?(?:interruption|termination) notice",
            (
                "(?:EC2 |AWS |Azure )?[Ss]pot (?:instance|VM|node)?.*(?:will be|is being) "
                "(?:terminated|reclaimed|preempted|evicted)"
            ),
            "instance (?:was|is being) preempted",
            r"compute\.instances\.preempted",
            "ACPI G2 Soft Off",
            "TERMINATE_ON_HOST_MAINTENANCE",
            r"\x22?EventType\x22?[\x22':= ]+\x22?Preempt\b",
        ),
        "the pod had to make room",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.deadline",
        "walltime",
        Role.CAUSE,
        (
            "deadlineexceeded",
            "deadline",
        ),
        (
            _REASON + r"DeadlineExceeded\b",
            "was active on the node longer than the specified deadline",
            "Job was active longer than specified deadline",
        ),
        "the time that the job may take was over",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.node-storage",
        "infra-storage",
        Role.CAUSE,
        (
            "mountvolume",
            "failed for volume",
            "failedmount",
            "failedattachvolume",
            "ephemeral-storage",
            "diskpressure",
            "ephemeral local storage",
            "volumefailed",
        ),
        (
            _REASON + r"(?:FailedMount|FailedAttachVolume|FailedMapVolume|VolumeFailedDelete)\b",
            "low on resource: ephemeral-storage",
            "ephemeral local storage usage exceeds",
            r"ha[sd] condition: \[DiskPressure\]",
            r"MountVolume\.\w+ failed for volume",
        ),
        "a volume could not be mounted, or the node's disk is full",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.evicted-memory",
        "job-oom",
        Role.CAUSE,
        (
            "low on resource: memory",
            "memorypressure",
        ),
        (
            "low on resource: memory",
            r"ha[sd] condition: \[MemoryPressure\]",
        ),
        "the pod was evicted since the node had no memory left",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.node",
        "infra-node",
        Role.CAUSE,
        (
            "nodelost",
            "nodenotready",
            "evicted",
            "unhealthy",
            "nodeaffinity",
            "unexpectedadmissionerror",
            "nodeshutdown",
            "terminated",
            "node is not ready",
            "node-problem",
            "kernelpanic",
            "node not ready",
            "unreachable",
            "nodeunreachable",
        ),
        (
            _REASON
            + "(?:NodeLost|NodeNotReady|Evicted|NodeShutdown|UnexpectedAdmissionError|"
            + r"NodeUnreachable|KernelDeadlock|KernelHasNoDeadlock)\b",
            (
                r"[Nn]ode (?P<host>[\w.-]+) (?:is|status is now:?|became) ?(?:not ready|NotReady|"
                "NodeNotReady)"
            ),
            "[Nn]ode is not ready",
            r"node\.kubernetes\.io/(?:unreachable|not-ready)",
            "Pod was terminated in response to imminent node shutdown",
            r"Allocate failed due to .*(?:unhealthy|nvidia\.com/gpu)",
        ),
        "the node of the pod failed",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.image",
        "job-config",
        Role.CAUSE,
        (
            "pull image",
            "exec format",
            "imagepull",
            "errimage",
            "invalidimagename",
            "createcontainerconfigerror",
            "createcontainererror",
            "runcontainererror",
            "failedcreate",
            "containercannotrun",
            "configmap",
            "starterror",
        ),
        (
            _REASON
            + "(?:ImagePullBackOff|ErrImagePull|InvalidImageName|ErrImageNeverPull|"
            + "CreateContainerConfigError|CreateContainerError|RunContainerError|"
            + r"ContainerCannotRun|StartError)\b",
            "Back-off pulling image",
            r"\b(?:ImagePullBackOff|ErrImagePull|CreateContainerConfigError|InvalidImageName)\b",
            "Failed to pull image",
            r"(?:ImagePullBackOff|CreateContainerConfigError)\s+\d",
            r"MountVolume\.SetUp failed for volume \S+ : configmap .* not found",
            r"error: (?:configmap|secret) \S+ not found",
        ),
        "the container could not be made as it is described",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.deleted",
        "user",
        Role.ROOT,
        (
            "deleted",
            "suspended",
        ),
        (
            "[Jj]ob(?:Set)? (?:was |has been )?(?:suspended|deleted) by",
            _REASON + r"(?:JobSuspended|Suspended)\b",
        ),
        "the job was deleted or suspended",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.unscheduled",
        "infra-node",
        Role.REMARK,
        (
            "failedscheduling",
            "insufficient",
        ),
        (
            _REASON + r"FailedScheduling\b",
            r"\d+/\d+ nodes are available: .*Insufficient",
        ),
        "there are not enough nodes for the job",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.backoff",
        "unknown",
        Role.CASCADE,
        (
            "backofflimit",
            "crashloop",
            "backoff",
            "failedjobs",
            "podfailurepolicy",
            "maxrestarts",
        ),
        (
            _REASON
            + "(?:BackoffLimitExceeded|CrashLoopBackOff|PodFailurePolicy|FailedJobs|"
            + r"ReachedMaxRestarts|BackOff)\b",
            "CrashLoopBackOff",
            "Back-off restarting failed container",
            "Job has reached the specified backoff limit",
        ),
        "the job was restarted as often as it may be",
        quotable=True,
        level=10,
    ),
    Rule(
        "kubernetes.killing",
        "unknown",
        Role.REMARK,
        (
            "killing",
            "stopping container",
        ),
        (
            _REASON + r"Killing\b",
            r"Stopping container \S+$",
        ),
        "a container was stopped",
        quotable=True,
        level=10,
    ),
)
