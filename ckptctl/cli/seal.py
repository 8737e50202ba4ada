"""`ckptctl seal`: verify a step and record its digests."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.options import JobsOpt, StepArg, only
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, StyledText, finding_lines, line, next_line, section
from ckptctl.formatting import counted, exact_size
from ckptctl.options import Parameter, Requirements, StorageOptions
from ckptctl.selection.sealing import Sealed

EXAMPLES = (
    "ckptctl seal /shared/ckpt/run-1234@latest",
    "ckptctl seal s3://bucket/run-1234/step_1200 --key-file /etc/ckptctl/seal.key",
    "ckptctl seal /shared/ckpt/run-1234@latest --replace --sign ~/.ssh/id_ed25519",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 75, 77)


def seal(
    step: StepArg,
    replace: Annotated[
        bool, Parameter("--replace", "Replace an existing seal, if the step has no fault.")
    ] = False,
    adopt: Annotated[
        str | None,
        Parameter(
            "--adopt REASON",
            "Accept a step that was sealed for another root or under another name: compare it "
            "with that seal, and make a new one that records who accepted it and why.",
        ),
    ] = None,
    accept_unverifiable: Annotated[
        bool, Parameter("--accept-unverifiable", "Seal a step that cannot be proven good.")
    ] = False,
    jobs: JobsOpt = None,
    *,
    requirements: Annotated[
        Requirements,
        only("key_file", "sign", "saved_world_size", "marks", "pattern", "state", "grace"),
    ],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Verify a step and record its digests.

    Inspects the step, reads every byte, and writes .ckptctl/seal.json into it; nothing else is
    changed. A step that is not complete is refused with its exit code. With --quiet the address of
    the seal is printed.
    """
    sealed = ckptctl.seal(
        step,
        replace=replace,
        adopt=adopt,
        accept_unverifiable=accept_unverifiable,
        jobs=jobs,
        on_progress=lambda done, total: out.progress("digested", done, total),
        requirements=requirements,
        storage=storage,
    )
    out.answer(
        document_of("sealed", sealed),
        lambda: sealed_lines(sealed),
        bare=() if sealed.path is None else (sealed.path,),
    )
    return sealed.exit_code


def sealed_lines(sealed: Sealed) -> list[Line]:
    """That the step is sealed and how, or why it is not."""
    found = sealed.report.findings
    if sealed.path is not None:  # there is one now
        found = tuple(finding for finding in found if finding.code != "seal.missing")
    findings = section(finding_lines(found))
    if sealed.path is None:
        head = line(StyledText(sealed.message, "bad"), hang=2)
        url = line("  ", StyledText(sealed.url, "name"), solid=True)
        return [head, url, EMPTY, *findings, *next_line(sealed.next_command)]
    digested = f"{counted(sealed.n_files, 'file')}, {exact_size(sealed.n_bytes)}"
    digested += f", digests by {sealed.kind}"
    if sealed.n_stored:
        digested += f", the store's own checksums of {counted(sealed.n_stored, 'file')}"
    signed = [] if sealed.signer is None else [line(f"  signed by {sealed.signer}", hang=4)]
    written = "replaced " if sealed.replaced else "written to "
    return [
        line(StyledText("sealed", "good"), " ", StyledText(sealed.url, "name"), solid=True),
        line(f"  {digested}", hang=4),
        line(f"  inspected first, at level {sealed.report.level.value}", hang=4),
        *signed,
        line(f"  place {sealed.sequence:,} of the seals of run {sealed.run}", hang=4),
        line("  ", written, StyledText(sealed.path, "name"), solid=True),
        EMPTY,
        *findings,
        *next_line(sealed.next_command),
    ]
