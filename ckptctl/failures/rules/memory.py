"""Who ran out of memory: a device, the process, the job's cgroup, or the node?"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "memory.device",
        "job-oom",
        Role.ROOT,
        (
            "cuda runtime error",
            "out of memory",
            "ran out of memory",
            "out of memory",
            "outofmemory",
            "memory allocation",
            "status_alloc_failed",
            "alloc failed",
            "resource_exhausted",
            "outofresources",
            "hiperror",
            "not enough memory",
        ),
        (
            r"^(?:\w+\.)+OutOfMemoryError\b",
            r"cuda runtime error \(2\)",
            r"ran out of memory trying to allocate",
            "(?:CUDA|HIP|XPU|NPU|MPS)(?: error| backend)?:? out of memory",
            r"torch(?:\.cuda)?\.OutOfMemoryError",
            r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
            "cudaErrorMemoryAllocation",
            "hipErrorOutOfMemory",
            "RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "Failed to CUDA calloc",
            r"Cuda failure (?:\d+ )?'out of memory'",
            "NVSHMEM.*out of memory",
        ),
        "the memory of the device ran out",
    ),
    Rule(
        "memory.kernel-killer",
        "job-oom",
        Role.CAUSE,
        (
            "memory.oom.group",
            "out of memory",
            "oom-kill",
            "oom_kill",
            "invoked oom",
            "oom_reaper",
            "memory cgroup",
        ),
        (
            r"killed due to memory\.oom\.group",
            "^(?:Memory cgroup )?[Oo]ut of memory: (?:Killed|Kill) process",
            "^oom-kill:constraint=",
            "invoked oom-killer",
            "^oom_reaper: reaped process",
            r"oom_kill(?:_group)? [1-9]\d*$",
            "systemd-oomd.*Killed",
            r"\.(?:scope|service|slice): A process of this unit has been killed by the OOM killer",
        ),
        "the kernel killed a process since memory ran out",
        quotable=True,
        level=20,
    ),
    Rule(
        "memory.host",
        "job-oom",
        Role.ROOT,
        (
            "memoryerror",
            "cannot allocate memory",
            "defaultcpuallocator",
            "bad_alloc",
            "enomem",
            "arraymemoryerror",
            "no space left on device",
            "insufficient shared memory",
            "unable to allocate",
            "not enough memory: you tried",
        ),
        (
            r"^(?:\w+\.)*(?:_Array)?MemoryError\b",
            r"\[Errno 12\] Cannot allocate memory",
            "DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            "not enough memory: you tried to allocate",
            r"what\(\):\s+std::bad_alloc",
            "^(?:terminate called .*)?'?std::bad_alloc",
            r"Unable to allocate [\d.]+ [KMGT]i?B for an array",
            "fork: Cannot allocate memory",
            "unable to (?:mmap|allocate shared memory).*Cannot allocate memory",
            "OSError: .*ENOMEM",
        ),
        "the memory of the machine ran out",
    ),
    Rule(
        "memory.shm",
        "job-oom",
        Role.ROOT,
        (
            "bus error encountered in worker",
            "shared memory",
            "/dev/shm",  # noqa: S108 - a text that is looked for
            "shm",
        ),
        (
            r"Unexpected bus error encountered in worker",
            "out of shared memory",
            r"insufficient shared memory \(shm\)",
            "No space left on device.*/dev/shm",
            "/dev/shm.*No space left",  # noqa: S108
            "unable to (?:write|open|resize|allocate) (?:to )?.*shared memory.*(?:No space|12|28)",
            r"Error while creating shared memory segment .*\(size \d+\)",
        ),
        "shared memory (/dev/shm) ran out",
        level=20,
    ),
    Rule(
        "memory.worker-killed",
        "job-oom",
        Role.SUSPECT,
        (
            "dataloader worker",
            "killed by signal",
        ),
        (
            r"DataLoader worker .*killed by signal: (?:Killed|Bus error)",
            (
                r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: (?:Killed|Bus "
                "error)"
            ),
        ),
        "a data loading worker was killed, mostly for want of memory",
    ),
    Rule(
        "memory.worker-gone",
        "job-oom",
        Role.CASCADE,
        ("exited unexpectedly",),
        (r"RuntimeError: DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly\s*$",),
        "a data loading worker is gone",
    ),
)
