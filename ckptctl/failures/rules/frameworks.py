"""What do launchers and frameworks say in words of their own?

torchrun and its agent, DeepSpeed, Megatron's rerun state machine, NVIDIA Resiliency
Extension, Lightning.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "megatron.disambiguate",
        "job-divergence",
        Role.ROOT,
        (
            "rerun",
            "disambiguate",
            "transient",
            "persistent",
            "validat",
        ),
        (
            r"(?:[Ee]xiting|exit).*(?:exit code|code) 16\b",
            "[Rr]erun.*(?:resume|re-run) .*(?:to )?disambiguate",
            "Possible (?:transient|persistent) error!",
        ),
        "a result could not be reproduced: a device may compute wrong",
        level=20,
        action="resume-elsewhere",
        restart="once",
    ),
    Rule(
        "megatron.validation",
        "job-divergence",
        Role.ROOT,
        (
            "validation",
            "code 17",
            "rerun",
        ),
        (
            r"(?:[Ee]xiting|exit).*(?:exit code|code) 17\b",
            "[Rr]erun.*(?:failed validation|validation failed)",
            "job failed result validation",
        ),
        "a result failed its validation, also when it was computed again",
        level=20,
        restart="no",
    ),
    Rule(
        "nvrx.stopped",
        "job-code",
        Role.ROOT,
        (
            "no progress",
            "max_no_progress",
            "no-progress",
            "maximum restarts",
            "exit code 93",
        ),
        (
            "(?:no[- ]progress|without progress).*(?:terminat|exceed|reached|stop|abort|giving up)",
            r"exit(?:ing|ed)?(?: with)?(?: exit)? code 93\b",
        ),
        "the supervisor gave up: restarts brought no progress",
        level=20,
        restart="no",
    ),
    Rule(
        "elastic.restarts",
        "unknown",
        Role.CASCADE,
        (
            "worker group",
            "childfailederror",
            "local_rank",
            "root cause",
            "workers",
            "exits with return code",
            "failed (exitcode",
        ),
        (
            r"failed \(exitcode: -?\d+\) local_rank",
            "ChildFailedError",
            "Worker group .*(?:FAILED|failed|restart)",
            r"\d+/\d+ attempts left",
            "exits with return code = [1-9]",
            "workers? (?:failed|group failed)",
            "Restarting worker group",
            "closing signal",
        ),
        "the launcher ended the other processes",
        level=20,
    ),
    Rule(
        "data.sample",
        "job-data",
        Role.ROOT,
        (
            "out of vocab",
            "vocab",
            "token id",
            "corrupt",
            "webdataset",
            "tarfile",
            "readerror",
            "unidentifiedimage",
            "decode",
            "mds",
            "tokens out of",
            "parquet",
            "arrowinvalid",
            "sample",
            "dataset",
        ),
        (
            (
                r"(?:token(?: id)?s?|input_ids?|index|label)\b.*\bout of (?:range|bounds|"
                r"vocab\w*)(?:.*vocab)?"
            ),
            "vocab(?:_size| size)?.*(?:out of (?:range|bounds)|exceed)",
            "UnidentifiedImageError",
            r"(?:webdataset|tarfile|shard \S+\.tar|\S+\.tar\b).*(?:ReadError|truncated|corrupt)",
            r"tarfile\.ReadError",
            r"pyarrow\.lib\.ArrowInvalid",
            (
                r"(?:dataset|data ?loader|sample|record|jsonl|\.bin|\.idx|parquet|\.mds|"
                r"\.jsonl)\S*\b.*(?:corrupt(?:ed)?\b|invalid (?:header|magic)|(?:is|was) truncated|"
                "cannot be (?:read|decoded))"
            ),
            "JSONDecodeError: .*",
        ),
        "the training data holds what the program cannot use",
    ),
    Rule(
        "config.usage",
        "job-config",
        Role.ROOT,
        (
            "error: argument",
            "/usr/bin/env",
            "exec format",
            "exec: ",
            "exec user process",
            "unrecognized arguments",
            "invalid choice",
            "arguments are required",
            "no module named",
            "command not found",
            "no such file",
            "hydra",
            "validationerror",
            "omegaconf",
            "can't open file",
            "address already in use",
            "eaddrinuse",
            "tokenizer",
            "repository not found",
            "gated",
            "divisible",
            "world size",
            "cannot import name",
            "symbol lookup",
            "cannot open shared object",
            "undefined symbol",
            "glibc",
            "configkeyerror",
            "batch_size",
            "batch size",
            "invalid config",
            "unknown option",
            "not a valid",
        ),
        (
            r"error: argument [^:]+: ",
            r"^/usr/bin/env: .*: No such file",
            (
                r"error: (?:unrecognized arguments|argument \S+: |the following arguments are "
                "required|invalid choice)"
            ),
            r"^(?:\w+\.)*(?:ModuleNotFoundError|ImportError): ",
            r"(?:^|: )[\w./-]+: command not found",
            r"line \d+: \S+: (?:No such file or directory|command not found)",
            "can't open file '",
            r"python\d?: can't open file",
            r"(?:hydra|omegaconf|pydantic\w*)\.\S*(?:Exception|Error)",
            "ConfigKeyError",
            "ConfigAttributeError",
            r"\bEADDRINUSE\b",
            "[Aa]ddress already in use",
            "error while loading shared libraries",
            "undefined symbol:",
            "symbol lookup error",
            "cannot open shared object file",
            "version `GLIBC",
            "RepositoryNotFoundError",
            "GatedRepoError",
            "[Cc]ould(?:n't| not) (?:find|locate|open) (?:the )?config",
            (
                "(?:AssertionError|ValueError|RuntimeError): .*(?:(?:must|should) be (?:evenly "
                ")?divisible|is not divisible|not divisible by|world[ _]size)"
            ),
            r"(?:[Ii]nvalid|[Uu]nknown|[Uu]nsupported) (?:user )?config\w*",
            r"^FileNotFoundError: .*(?:\.ya?ml|\.toml|\.json|config)",
            "exec: .*: not found",
            "exec format error",
        ),
        "the job is configured so that it cannot run",
    ),
    Rule(
        "compile.failed",
        "job-code",
        Role.ROOT,
        (
            "compil",
            "lowering",
            "inductor",
            "dynamo",
            "triton",
        ),
        (
            r"torch\._(?:dynamo|inductor)\.exc\.\w+",
            r"triton\.\S*(?:CompilationError|OutOfResources)",
            "(?:[Cc]ompil(?:ation|e)|[Ll]owering) (?:has )?(?:failed|error|failure)",
            "LoweringException",
            "ninja: build stopped",
            "RuntimeError: Error (?:building|compiling)",
        ),
        "the program could not be compiled",
        restart="no",
    ),
)
