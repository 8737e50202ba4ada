"""What do NCCL, Gloo, MPI and torch's process groups say, and which of it is a consequence?

One rank that dies makes all others speak: those are `cascade`. A timeout of a collective
says that ranks waited, not for whom.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "nccl.network",
        "infra-fabric",
        Role.ROOT,
        (
            "net/ib",
            "net_ib",
            "ibv_",
            "vendor err",
            "ib device",
            "port error",
            "net/ofi",
        ),
        (
            (
                "NET/IB ?: .*(?:Got completion from peer.*(?:with (?:status|error)|status=)|Got "
                r"async event|ibv_\w+ failed|(?:vendor[ _]err(?:or)?[ :]*(?:0x81|129|0x8a|138|0xf9|"
                r"249|0x88|136)|status=?(?:12|5|4|10|13)\b|"
                r"local protection|transport retry counter "
                "exceeded|RNR retry|work request flushed)|fatal|QP error|[Uu]nexpected|port error)"
            ),
            (
                "(?:Got completion|ibv_poll_cq).*(?:with (?:error|status)|opcode).*(?:vendor err|"
                "status)"
            ),
            r"Call to (?:wrap_)?ibv_\w+ failed",
            "NET/OFI .*(?:Request completed with error|RC: -|failed|error)",
            "(?:IBV_EVENT_PORT_ERR|IBV_EVENT_DEVICE_FATAL|IBV_EVENT_QP_FATAL)",
        ),
        "the network between nodes failed under NCCL",
    ),
    Rule(
        "nccl.usage",
        "job-code",
        Role.ROOT,
        (
            "ncclinvalid",
            "invalid usage",
            "invalid argument",
            "duplicate gpu",
        ),
        (
            r"nccl(?:InvalidUsage|InvalidArgument)\b",
            "NCCL.*error.*(?:invalid usage|invalid argument)",
            "Duplicate GPU detected",
        ),
        "NCCL was used in a way that it does not allow",
    ),
    Rule(
        "nccl.cuda",
        "unknown",
        Role.SUSPECT,
        (
            "ncclunhandledcuda",
            "unhandled cuda",
            "cuda failure",
        ),
        (
            "ncclUnhandledCudaError",
            "unhandled cuda error",
            r"Cuda failure (?:\d+ )?'?(?!out of memory)",
        ),
        "NCCL met an error of CUDA that it did not cause",
    ),
    Rule(
        "nccl.remote",
        "infra-fabric",
        Role.SUSPECT,
        (
            "ncclremoteerror",
            "remote process exited",
            "ncclsystemerror",
            "unhandled system error",
            "remote error",
        ),
        (
            "ncclRemoteError",
            "remote process exited or there was a network error",
            "ncclSystemError",
            "unhandled system error",
        ),
        "NCCL lost a peer: it died, or the network did",
    ),
    Rule(
        "nccl.internal",
        "unknown",
        Role.SUSPECT,
        (
            "ncclinternalerror",
            "nccl internal error",
            "internal error",
        ),
        (
            "ncclInternalError",
            "NCCL.*[Ii]nternal [Ee]rror",
            "DistBackendError: .*Internal error",
        ),
        "an internal error of NCCL",
    ),
    Rule(
        "collective.timeout",
        "hang",
        Role.SUSPECT,
        (
            "watchdog",
            "timed out",
            "timeout",
            "monitoredbarrier",
            "heartbeat",
            "timeouterror",
            "timedout",
        ),
        (
            "[Ww]atchdog caught collective operation timeout",
            "Some NCCL operations have failed or timed out",
            "monitoredBarrier",
            (
                r"(?:ALLREDUCE|ALLGATHER|BROADCAST|REDUCE_SCATTER|BARRIER|ALLTOALL\w*|COALESCED|SEND|"
                r"RECV)\w*.*(?:ran for \d+ milliseconds|timed? ?out)"
            ),
            r"Timed out waiting \d+ms for (?:recv|send) operation",
            "ProcessGroupNCCL's watchdog got stuck",
            "due to ProcessGroupNCCL watchdog hang",
            "Heartbeat monitor timed out",
            "Watchdog caught collective operation",
            (
                "(?:wait|barrier|[Cc]ollective|all_?reduce|rendezvous).*(?:timed out|timeout) "
                "(?:after|of|in)"
            ),
            "DistStoreError: (?:[Tt]imed out|wait timeout)",
            "(?:Socket|wait) [Tt]imeout.*(?:TCPStore|store|clients)",
            r"timed out after \d+ (?:seconds|ms|milliseconds) waiting for clients",
            "RendezvousTimeoutError",
            "exceeded.*(?:hard|soft)[_ ]timeout",
            "No heartbeat (?:was )?received",
            r"[Rr]ank \d+ (?:is|has been) (?:hung|unresponsive)",
            "section timeout",
        ),
        "ranks waited for one that did not come",
        level=20,
    ),
    Rule(
        "collective.desync",
        "job-code",
        Role.ROOT,
        (
            "mismatch between collective",
            "desync",
            "detected mismatch",
        ),
        (
            "Detected mismatch between collectives",
            "collective (?:sequence|desync)",
            "Desync (?:detected|debug: .*mismatch)",
        ),
        "ranks called different collectives",
    ),
    Rule(
        "collective.peer-gone",
        "unknown",
        Role.CASCADE,
        (
            "closed by peer",
            "reset by peer",
            "broken pipe",
            "connection closed",
            "connection refused",
            "peer",
            "nccl communicator was aborted",
            "abort",
            "recvvalue failed",
            "to avoid data inconsistency",
            "cleanup",
            "process group",
            "tcpstore",
            "store",
            "terminate called",
        ),
        (
            "[Cc]onnection (?:closed by|reset by) (?:remote )?peer",
            "Broken pipe",
            "Connection refused",
            "Connection was (?:likely )?closed",
            "NCCL communicator was aborted",
            "aborted communicator",
            "To avoid data inconsistency, we are taking the entire process down",
            "recvValue failed",
            "sendBytes failed",
            r"failed to recv, got \d+ bytes",
            "Process group watchdog thread terminated with exception",
            "Abort(?:ing|ed) (?:NCCL|process group|all|communicator|COMM)",
            "[Cc]aught signal 6",
            "terminate called after throwing an instance of 'c10::(?:DistBackend)?Error'",
            "Connection closed by remote",
            "RendezvousConnectionError",
            "RendezvousClosedError",
            "store (?:shut down|is (?:down|gone))",
            r"Failed to check the \"should dump\" flag",
        ),
        "another process had gone",
        level=20,
    ),
)
