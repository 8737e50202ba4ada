"""Which exceptions of Python are the program's own?

The last table to be asked: whatever has a better known cause was found before. An
exception behind a traceback is a root; without one it is suspected.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "python.config",
        "job-config",
        Role.ROOT,
        (
            "syntaxerror",
            "indentationerror",
            "taberror",
            "notimplementederror",
        ),
        ("^(?:SyntaxError|IndentationError|TabError): ",),
        "the program is not valid Python",
    ),
    Rule(
        "python.build",
        "job-config",
        Role.ROOT,
        (
            "not compiled with",
            "doesn't have nccl",
        ),
        (
            r"Error: .*not compiled with [A-Z]{3,}",
            "Distributed package doesn't have NCCL",
        ),
        "what is installed was built without what the job needs",
    ),
    Rule(
        "python.limit",
        "job-config",
        Role.ROOT,
        (
            "too many open files",
            "can't start new thread",
            "resource temporarily unavailable",
        ),
        (
            r"^OSError: \[Errno 24\] Too many open files",
            r"^RuntimeError: can't start new thread",
            r"(?:fork|pthread_create|BlockingIOError).*Resource temporarily unavailable",
        ),
        "a limit of the account or the container was reached (`ulimit -a`)",
    ),
    Rule(
        "python.path",
        "job-config",
        Role.ROOT,
        ("filenotfounderror",),
        (r"^FileNotFoundError: \[Errno 2\] ",),
        "a file that the job was told to read is not there",
    ),
    Rule(
        "python.name",
        "infra-fabric",
        Role.ROOT,
        (
            "gaierror",
            "name resolution",
        ),
        (
            r"^(?:socket\.)?gaierror: ",
            "Temporary failure in name resolution",
        ),
        "a host name could not be resolved",
    ),
    Rule(
        "python.assertion",
        "job-code",
        Role.ROOT,
        (
            "assertionerror",
            "assertion `",
            "assertion failed",
        ),
        (
            r"^AssertionError\b",
            "Assertion [`'].*[`'] failed",
        ),
        "an assertion of the program failed",
    ),
    Rule(
        "python.exception",
        "job-code",
        Role.ROOT,
        (
            "error",
            "exception",
        ),
        (r"^(?:(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)))(?:: |$)",),
        "the program ended by an exception",
    ),
)
