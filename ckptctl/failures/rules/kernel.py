"""What does the kernel say when a node, a link or its memory fails?

Forms of Linux 4.18 to 6.x, of the NVIDIA, AMD and Mellanox drivers, and of SXid of the
Fabric Manager. The out-of-memory killer is in `memory`, file systems in `storage_errors`.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "kernel.mce",
        "infra-node",
        Role.CAUSE,
        (
            "machine check",
            "mce:",
            "hardware error",
        ),
        (
            r"mce: \[Hardware Error\](?!.*(?:corrected|CMCI))",
            "Machine check events? logged.*uncorrect",
            "Kernel panic - not syncing: .*[Mm]achine check",
            "Uncorrected (?:hardware )?(?:memory )?error",
            (
                r"\[Hardware Error\]:? .*(?:event severity: fatal|Uncorrected|section_type: memory "
                "error.*fatal)"
            ),
        ),
        "an uncorrected hardware error of the machine",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.edac",
        "infra-node",
        Role.CAUSE,
        ("edac",),
        (r"EDAC .*\b(?:[1-9]\d* )?UE\b",),
        "an uncorrectable error of the machine's memory",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.edac-corrected",
        "infra-node",
        Role.REMARK,
        ("edac",),
        (r"EDAC .*\bCE\b",),
        "a corrected error of the machine's memory",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.panic",
        "infra-node",
        Role.CAUSE,
        ("kernel panic",),
        ("^Kernel panic - not syncing",),
        "the kernel panicked",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.lockup",
        "infra-node",
        Role.CAUSE,
        (
            "lockup",
            "rcu_sched",
            "rcu:",
        ),
        (
            "(?:watchdog: )?BUG: (?:soft|hard) lockup",
            "Watchdog detected hard LOCKUP",
            "rcu(?:_sched|_preempt)?:? .*(?:self-)?detected stalls?",
        ),
        "a processor of the node hangs",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.oops",
        "infra-node",
        Role.ROOT,
        (
            "unable to handle",
            "general protection fault",
        ),
        (
            "^BUG: unable to handle",
            r"^general protection fault(?:,|:) .*\[#\d+\]",
        ),
        "the kernel met a fault",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.pcie",
        "infra-node",
        Role.CAUSE,
        (
            "pcie bus error",
            "aer:",
            "pcieport",
        ),
        (
            r"(?:AER|PCIe Bus Error):.*(?:severity=Uncorrect|Fatal\)|Uncorrect(?:ed|able) \(Fatal)",
            "AER: .*Uncorrect(?:ed|able).*(?:Fatal|error received)",
            "device recovery failed",
            "pcieport.*Surprise (?:Down|Link)",
        ),
        "a fatal error of the PCIe bus",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.nvidia-lost",
        "infra-node",
        Role.CAUSE,
        ("fallen off the bus", "rminitadapter"),
        ("^NVRM: .*(?:has fallen off the bus|RmInitAdapter failed)",),
        "the driver lost the GPU",
        level=20,
        kernel=True,
    ),
    Rule(
        "gpu.lost",
        "infra-node",
        Role.CAUSE,
        ("unable to determine the device", "gpu is lost"),
        (
            "Unable to determine the device handle for GPU.*(?:GPU is lost|Unknown Error)",
            "^(?:nvidia-smi: )?(?:Error: )?GPU is lost",
        ),
        "nvidia-smi does not find the GPU any more",
        level=20,
    ),
    Rule(
        "kernel.sxid",
        "infra-fabric",
        Role.CAUSE,
        ("sxid",),
        (r"SXid \((?P<device>[\w:.]+)\): \d+, (?:Fatal|(?!Non-fatal).*\bFatal\b)",),
        "a fatal error of an NVSwitch",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.sxid-nonfatal",
        "infra-fabric",
        Role.REMARK,
        ("sxid",),
        (r"SXid \((?P<device>[\w:.]+)\): \d+",),
        "an error of an NVSwitch that is not fatal",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.link-down",
        "infra-fabric",
        Role.ROOT,
        (
            "carrier",
            "link is down",
            "link down",
            "link becomes",
            "nic link",
            "mlx5",
            "port_error",
            "port error",
            "port down",
        ),
        (
            r"\bNIC Link is Down",
            r"^\S+(?: \S+)*: [Ll]ink (?:is )?down$",
            (
                "mlx5_core .*(?:Link down|health compromised|device's health|firmware fatal|"
                "assert_var|Port module event.*(?:[Hh]igh [Tt]emp|[Bb]us stuck|error))"
            ),
            r"^\S*\bib\d+: .*(?:link (?:is )?down|[Cc]arrier lost)",
            r"(?:mlx5|ib|roce|rdma)\S*:? .*link (?:is )?down",
            r"^\S+(?: \S+:)? \S+: NIC Link is Down",
            "Port (?:active|state) (?:->|changed to) (?:Down|DOWN)",
        ),
        "a network link of the node went down",
        level=20,
    ),
    Rule(
        "kernel.amd",
        "infra-node",
        Role.CAUSE,
        ("amdgpu",),
        (
            (
                r"amdgpu (?P<device>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.\d)?).*(?:GPU reset "
                r"(?:begin|failed)|uncorrectable hardware error|ring \S+ timeout|RAS.*uncorrect|"
                "[Pp]oison)"
            ),
        ),
        "an AMD GPU failed or was reset",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.thermal",
        "infra-node",
        Role.REMARK,
        (
            "temperature above",
            "thermal",
            "throttl",
        ),
        (
            "temperature above threshold",
            "HW (?:Thermal )?Slowdown.*Active",
        ),
        "a device became too hot",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.hung-task",
        "infra-storage",
        Role.SUSPECT,
        ("blocked for more than",),
        (r"task \S+ blocked for more than \d+ seconds",),
        "a process waited for the kernel for minutes, mostly for storage",
        level=20,
        kernel=True,
    ),
    Rule(
        "kernel.segfault",
        "job-code",
        Role.SUSPECT,
        (
            "segfault at",
            "traps:",
        ),
        (
            r"^[\w./-]+\[\d+\]: segfault at",
            r"^traps: \S+\[\d+\] (?:general protection|trap)",
        ),
        "the kernel ended a program for an access to memory that is not its own",
        level=20,
        kernel=True,
    ),
    Rule(
        "gpu.ecc",
        "infra-node",
        Role.CAUSE,
        (
            "ecc error",
            "uncorrectable ecc",
            "eccuncorrectable",
        ),
        (
            "uncorrectable (?:NVLink or )?ECC error",
            "cudaErrorECCUncorrectable",
            "ECC error encountered",
        ),
        "a memory error of the GPU that ECC could not correct",
    ),
    Rule(
        "gpu.unavailable",
        "infra-node",
        Role.ROOT,
        (
            "no cuda gpus",
            "found no",
            "no cuda-capable device",
            "cudaerrornodevice",
            "nvml",
            "system not yet initialized",
            "cuda unknown error",
            "all cuda-capable devices are busy",
            "devices are busy",
            "driver/library version mismatch",
            "couldn't communicate with the nvidia driver",
            "gpu requires reset",
            "hardware stack error",
            "gpu has failed",
            "device not ready",
        ),
        (
            r"No CUDA GPUs are available",
            (
                "(?:CUDA error|RuntimeError|CUDA call|error).*: (?:no CUDA-capable device is "
                r"detected|system not yet initialized|CUDA-capable device\(s\) is/are busy|all "
                "CUDA-capable devices are busy)"
            ),
            "Failed to initialize NVML",
            "NVML.*(?:GPU is lost|Driver/library version mismatch)",
            "CUDA unknown error - this may be due to",
            "NVIDIA-SMI has failed because it couldn't communicate",
            "[Gg][Pp][Uu] requires reset",
            "hardware stack error",
        ),
        "the GPU of the node cannot be used",
    ),
    Rule(
        "gpu.nvlink",
        "infra-fabric",
        Role.CAUSE,
        ("nvlink",),
        (
            (
                "(?:invalid access of peer GPU memory over "
                "nvlink|uncorrectable NVLink error|nvlink "
                "(?:error|failure|fatal|timeout).*(?:detected|fatal|occurred)|NVLink.*went down)"
            ),
        ),
        "a failure of NVLink",
    ),
    Rule(
        "gpu.dcgm",
        "infra-node",
        Role.CAUSE,
        (
            "dcgm",
            "diagnostic",
        ),
        (r"(?:dcgm\w*|diagnostic).*\b(?:Result|Status)?:? ?(?:Fail(?:ed)?)\b(?! *: *0)",),
        "the diagnosis of the GPU failed",
    ),
    Rule(
        "host.unreachable",
        "infra-node",
        Role.ROOT,
        (
            "no route to host",
            "host is down",
            "ehostunreach",
        ),
        (
            "No route to host",
            "Host is down",
            "EHOSTUNREACH",
        ),
        "a node cannot be reached",
        level=40,
    ),
)
