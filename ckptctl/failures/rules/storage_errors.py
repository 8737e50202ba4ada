"""What do file systems and object stores say when they fail?

Error numbers as Python, C and shells word them; kernel messages of NFS, Lustre, GPFS,
WEKA, BeeGFS, Ceph and local disks; errors of the S3, GCS and Azure clients.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "storage.full",
        "infra-storage",
        Role.ROOT,
        (
            "pytorchstreamwriter",
            "enforce fail at inline_container",
            "no space left",
            "disk quota exceeded",
            "enospc",
            "edquot",
            "file system is full",
            "quota exceeded",
            "over quota",
            "insufficientstorage",
            "quotaexceeded",
        ),
        (
            r"PytorchStreamWriter failed writing",
            "No space left on device",
            "Disk quota exceeded",
            r"\bENOSPC\b",
            r"\bEDQUOT\b",
            "[Ff]ile ?system is full",
            "[Ss]torage quota exceeded",
            r"(?:XMinioStorageFull|InsufficientStorage|QuotaExceeded)\b",
        ),
        "the storage is full",
        restart="no",
    ),
    Rule(
        "storage.kernel",
        "infra-storage",
        Role.CAUSE,
        (
            "nfs:",
            "lustre",
            "ldlm",
            "i/o error",
            "xfs (",
            "ext4-fs",
            "blk_update_request",
            "nvme",
            "ceph",
            "beegfs",
            "mmfs",
            "gpfs",
            "weka",
            "buffer i/o",
            "critical medium",
            "rpc:",
        ),
        (
            r"^nfs: server (?P<device>\S+) not responding",
            r"^LustreError: .*(?:evict|-110|-5\b|-108|timed out|failed)",
            "^Lustre: .*(?:Connection to .* was lost|Connection restored|timed out)(?<!restored)",
            "^LustreError: 11-0",
            (
                "^(?:blk_update_request: )?(?:critical (?:medium|target)|I/O) error,? dev "
                r"(?P<device_2>\S+)"
            ),
            "^Buffer I/O error on dev",
            "^EXT4-fs error",
            r"^XFS \((?P<device_3>\S+)\): .*(?:error|shut(?:ting)? down|Corruption)",
            (
                r"^nvme (?P<device_4>\S+): .*(?:controller is down|I/O .*timeout|Device not ready|"
                "failed)"
            ),
            "^libceph: .*(?:socket closed|timed out|error)",
            "^ceph: .*(?:hung|evict|blacklist|blocklist)",
            r"mmfs\S*: .*(?:Stale|unmount|panic|lost)",
            "wekafs.*(?:error|timed out)",
            "beegfs.*(?:error|unreachable|not respond)",
            "^EXT4-fs .*Remounting filesystem read-only",
        ),
        "the kernel reports that a file system or a disk failed",
        level=20,
        kernel=True,
    ),
    Rule(
        "storage.errno",
        "infra-storage",
        Role.ROOT,
        (
            "input/output error",
            "stale file handle",
            "stale nfs",
            "remote i/o error",
            "transport endpoint",
            "read-only file system",
            "estale",
            "cannot send after transport",
            "[errno 5]",
            "[errno 116]",
            "eio",
            "structure needs cleaning",
            "[errno 121]",
            "[errno 108]",
            "erofs",
            "connection timed out: '/",
        ),
        (
            "Input/output error",
            "Stale (?:NFS )?file handle",
            "Remote I/O error",
            "Transport endpoint is not connected",
            "Read-only file system",
            r"\bESTALE\b",
            r"\[Errno (?:5|107|108|116|117|121)\]",
            "Cannot send after transport endpoint shutdown",
            "Structure needs cleaning",
            r"\[Errno 110\] Connection timed out: '/",
            r"\bEIO\b(?!\w)",
        ),
        "the file system failed",
    ),
    Rule(
        "storage.object",
        "infra-storage",
        Role.ROOT,
        (
            "reduce your request rate",
            "endpointconnection",
            "connectionerror",
            "timeouterror",
            "streamingerror",
            "slowdown",
            "slow down",
            "internalerror",
            "serviceunavailable",
            "requesttimeout",
            "503 service",
            "endpointconnection",
            "connecttimeouterror",
            "readtimeouterror",
            "incompleteread",
            "connectionclosederror",
            "retries exceeded",
            "badstatuscode",
            "http 503",
            "500 internal",
            "too many requests",
            "serviceexception",
            "retryerror",
            "s3_error",
            "awsservice",
            "serverbusy",
            "max retries",
            "operationtimedout",
            "status code: 503",
            "statuscode: 503",
        ),
        (
            r"^(?:\w+\.)*(?:EndpointConnectionError|ConnectTimeoutError|ReadTimeoutError|ResponseStreamingError|IncompleteReadError)\b",
            (
                r"\((?:SlowDown|InternalError|ServiceUnavailable|RequestTimeout|503|500|"
                r"Throttling\w*)\) when calling the \w+ operation"
            ),
            (
                r"(?:botocore|aiobotocore|urllib3|aiohttp)\.\w*exceptions?\.(?:EndpointConnectionError"
                r"|ConnectTimeoutError|ReadTimeoutError|ConnectionClosedError|IncompleteRead\w*|"
                "ResponseStreamingError|ServerTimeoutError)"
            ),
            (
                "(?:S3|s3|gs|GCS|gcsfs|Azure|azure|blob|"
                "minio|bucket|object store).*(?:SlowDown|Slow "
                "Down|503|ServerBusy|InternalError|Service ?Unavailable|Please reduce your request "
                "rate|timed? ?out|Max retries exceeded)"
            ),
            r"(?:SlowDown|Please reduce your request rate|ServerBusy)\b",
            (
                r"HTTPSConnectionPool\(host='[\w.-]*(?:s3|storage|blob|minio)[\w.-]*'.*Max retries "
                "exceeded"
            ),
            (
                r"google\.api_core\.exceptions\.(?:ServiceUnavailable|InternalServerError|RetryError|"
                "TooManyRequests|GatewayTimeout)"
            ),
            r"gcsfs\.retry\.HttpError: .*(?:50\d|429)",
            "AWS_ERROR_S3_(?:SLOW_DOWN|INTERNAL_ERROR)",
            "AWS Error (?:SLOW_DOWN|NETWORK_CONNECTION)",
        ),
        "the object store did not do what was asked",
    ),
    Rule(
        "storage.denied",
        "job-config",
        Role.ROOT,
        (
            "accessdenied",
            "access denied",
            "nosuchbucket",
            "invalidaccesskeyid",
            "signaturedoesnotmatch",
            "expiredtoken",
            "nocredentials",
            "403 forbidden",
            "unable to locate credentials",
            "(403)",
            "permission denied",
            "forbidden",
            "tokenrefresh",
        ),
        (
            (
                r"\((?:AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|"
                r"NoSuchBucket|403|RequestTimeTooSkewed)\) when calling"
            ),
            "NoCredentialsError",
            "Unable to locate credentials",
            r"^(?:\w+\.)*PermissionError: .*(?:\[Errno 13\]|Access Denied|Forbidden|does not have)",
            r"(?:OSError|HttpError|ClientError)\S* .*(?:Forbidden|403|does not have storage\.)",
            ": Permission denied$",
            "bash: .*Permission denied",
        ),
        "the storage or the system refused access",
    ),
)
