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
