"""What is said when a checkpoint cannot be loaded: damaged, or not this model's?"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "checkpoint.mismatch",
        "job-config",
        Role.ROOT,
        (
            "key(s) in",
            "state_dict",
            "size mismatch",
            "missing key",
            "unexpected key",
            "shape mismatch",
            "tensor sizes",
            "not match",
            "does not match",
            "mismatch",
        ),
        (
            r"(?:^|: )(?:Missing|Unexpected) key\(s\) in",
            r"Error\(s\) in loading state_dict",
            r"^size mismatch for \S+",
            r"^Missing key\(s\)? in",
            "^(?:RuntimeError: )?Missing key in checkpoint state_dict",
            (
                r"(?:Missing|Unexpected) keys? (?:\(s\) )?(?:found )?in (?:the )?(?:checkpoint|"
                "state[_ ]dict)"
            ),
            "Size mismatch between saved",
            "Global shape mismatch for loaded",
            (
                r"[Cc]heckpoint.*(?:shape|size|world size|arg\w*|config\w*|value).*(?:mismatch|"
                "(?:does not|doesn't|not) match)"
            ),
            "loaded state dict (?:contains|has)",
            (
                "(?:CheckpointingException|ValueError|AssertionError|RuntimeError): .*(?:tensor[- "
                "]parallel|pipeline|world size|num_layers|hidden_size).*(?:checkpoint|mismatch)"
            ),
        ),
        "the checkpoint is not of this model or this configuration",
    ),
    Rule(
        "checkpoint.damaged",
        "bad-checkpoint",
        Role.ROOT,
        (
            ".distcp",
            "filenotfounderror",
            "pytorchstreamreader",
            "checkpoint file is corrupted",
            "checkpointexception",
            "unpicklingerror",
            "pickle data was truncated",
            "failed finding central directory",
            "invalid magic number",
            "invalid header",
            "safetensorerror",
            "headertoo",
            "metadataincomplete",
            "checkpointing_exception",
            "corrupt",
            "not a zip",
            "badzipfile",
            "ran out of input",
            "unexpected eof",
            "eoferror",
            ".metadata",
            "incompletebuffer",
            "crc",
            "truncated",
            "file in archive",
            "archive is in",
            "file size",
            "checkpoint",
        ),
        (
            "PytorchStreamReader failed",
            "high likelihood that your checkpoint file is corrupted",
            r"(?:_pickle|pickle)\.UnpicklingError",
            "pickle data was truncated",
            "failed finding central directory",
            "SafetensorError: .*(?:InvalidHeader|HeaderToo|MetadataIncompleteBuffer|header)",
            "CheckpointException ranks?",
            "CheckpointException: .*(?:corrupt|[Mm]etadata|incomplete|not found|read)",
            r"(?:zipfile\.)?BadZipFile: ",
            "EOFError: Ran out of input",
            "unexpected EOF(?:,| ).*(?:corrupt|expected)",
            r"FileNotFoundError: .*(?:/\.metadata|\.distcp|__\d+_\d+\.distcp)",
            (
                r"(?:checkpoint|\.pt|\.distcp|\.safetensors|\.ckpt)\S* (?:is|are|appears?|"
                "seems?)(?: to be)? (?:corrupt(?:ed)?|incomplete|truncated|damaged)"
            ),
            (
                "(?:[Bb]ad CRC-32|CRC (?:mismatch|error)|"
                "checksum (?:mismatch|error)).*(?:checkpoint|"
                r"shard|distcp|\.pt|archive|record|file)"
            ),
            (
                "CheckpointingException: .*(?:corrupt|not "
                "a distributed checkpoint|could not (?:read|"
                "load|find)|[Mm]issing)"
            ),
            "ShardMetadataMissing",
            r"(?:invalid magic number|corrupt file)\?",
            "RuntimeError: Invalid magic number; corrupt file",
            "No (?:common|metadata) file found in (?:the )?checkpoint",
        ),
        "the checkpoint that was to be loaded is damaged or not whole",
    ),
)
