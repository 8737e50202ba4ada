"""Which CUDA errors are the program's, and which the device's?

ECC, lost devices and NVLink are in `kernel`, memory in `memory`. What CUDA reports may have
happened a while before: where it was seen says little.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "cuda.driver",
        "job-config",
        Role.ROOT,
        (
            "no kernel image",
            "unsupported toolchain",
            "ptx",
            "driver",
            "forward compatibility",
            "nvidia driver",
        ),
        (
            r"no kernel image is available",
            "CUDA driver version is insufficient",
            "forward compatibility was attempted on non supported HW",
            "Found no NVIDIA driver",
            "NVIDIA driver on your system is too old",
            "unsupported toolchain",
            "CUDA driver initialization failed",
            "cudaErrorInsufficientDriver",
        ),
        "the driver does not fit the program",
    ),
    Rule(
        "cuda.program",
        "job-code",
        Role.ROOT,
        (
            "illegal memory access",
            "device-side assert",
            "misaligned address",
            "invalid device function",
            "invalid configuration",
            "illegal instruction",
            "invalid argument",
            "invalid resource handle",
            "illegaladdress",
            "no kernel image",
            "invalid device ordinal",
            "index out of bounds",
            "invalid program counter",
            "cudaerrorassert",
            "assertion `",
            "cublas_status",
            "cudnn_status",
            "memory access fault by gpu",
            "invalid_value",
        ),
        (
            (
                "(?:CUDA|HIP)(?: runtime| driver)? ?(?:error|failure|exception|call)?.*(?:illegal "
                "memory access|device-side assert|misaligned "
                "address|invalid device function|invalid "
                "configuration argument|illegal instruction|"
                "invalid argument|invalid resource handle|"
                "no kernel image is available|invalid device ordinal|invalid program counter)"
            ),
            (
                "cudaError(?:IllegalAddress|Assert|MisalignedAddress|InvalidDeviceFunction|"
                "InvalidConfiguration|IllegalInstruction)"
            ),
            "[Aa]n illegal memory access was encountered",
            "device-side assert triggered",
            r"\.cu:\d+: .*(?:Assertion|index out of bounds)",
            (
                "(?:CUBLAS|CUDNN)_STATUS_(?:INVALID_VALUE|NOT_SUPPORTED|BAD_PARAM|EXECUTION_FAILED|"
                "MAPPING_ERROR)"
            ),
            "Memory access fault by GPU",
            r"block: \[\d+,\d+,\d+\], thread: .*Assertion",
        ),
        "the program made the GPU do something illegal",
    ),
    Rule(
        "cuda.launch",
        "job-code",
        Role.SUSPECT,
        (
            "unspecified launch failure",
            "launch failure",
            "launchfailure",
            "launch timed out",
            "cublas_status_internal",
            "cudnn_status_internal",
            "status_not_initialized",
            "unknown error",
        ),
        (
            "unspecified launch failure",
            "cudaErrorLaunchFailure",
            "launch timed out and was terminated",
            "(?:CUBLAS|CUDNN)_STATUS_(?:INTERNAL_ERROR|NOT_INITIALIZED)",
            "CUDA error: unknown error",
        ),
        "the GPU stopped a kernel and does not say why",
    ),
)
