"""Render the results of `reshard`, `convert` and `diff`."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.cli.formatting import count, exact_size, size
from ckptctl.cli.text import EMPTY, Line, Span, Style, line
from ckptctl.cli.views.common import finding_lines, next_line, section
from ckptctl.resharding.results import Converted, Diff, Difference, RankShare, Reshard

_SHOWN = 16
"""Of more shard files than so many, the first and the last few are shown."""


def reshard_lines(answer: Reshard) -> list[Line]:
    """The plan, or that the new step is there, or why it is not."""
    if answer.exit_code:
        head = line(Span(answer.message, "bad"), hang=2)
        findings = section(finding_lines(answer.report.findings))
        return [head, EMPTY, *findings, *next_line(answer.next_command)]
    if answer.written:
        head = line(Span("resharded", "good"), " ", Span(answer.target, "name"), solid=True)
    else:
        head = line(Span("plan", "strong"), " ", Span(answer.target, "name"), solid=True)
    return [
        head,
        line(f"  {_ranks(answer)}", hang=4),
        line(f"  {_contents(answer)}", hang=4),
        line(f"  {count(answer.n_files, 'file')}, {exact_size(answer.n_bytes)}", hang=4),
        *_state(answer),
        EMPTY,
        *section(_shares(answer)),
        *section(finding_lines(answer.findings)),
        *next_line(answer.next_command),
    ]


def _ranks(answer: Reshard) -> str:
    saved = answer.saved_world_size
    before = "an unknown number of ranks" if saved is None else count(saved, "rank")
    after = count(answer.world_size, "rank")
    arranged = "" if answer.mesh == f"dp={answer.world_size}" else f" ({answer.mesh})"
    return f"from {answer.source}, saved by {before}, for {after}{arranged}"


def _contents(answer: Reshard) -> str:
    others = count(answer.n_bytes_entries, "other entry").replace("entrys", "entries")
    return (
        f"{count(answer.n_tensors, 'tensor')}: {answer.n_cut:,} cut, {answer.n_whole:,} whole; "
        f"{others}"
    )


def _state(answer: Reshard) -> Iterator[Line]:
    if not answer.written:
        yield line("  nothing is written yet", hang=4)
        return
    continued = count(answer.continued, "file")
    more = f"; {continued} were there from an earlier call" if answer.continued else ""
    yield line(f"  proven at level content, sealed, published{more}", hang=4)


def _shares(answer: Reshard) -> Iterator[Line]:
    if answer.written:
        return
    shares = answer.shares
    shown = shares if len(shares) <= _SHOWN else (*shares[: _SHOWN - 2], *shares[-1:])
    width = max((len(share.file) for share in shown), default=0)
    yield line(f"  {'shard file':<{width}}  {'size':>9}  {'entries':>7}  {'reads':>7}", solid=True)
    for number, share in enumerate(shown):
        if number == _SHOWN - 2 and len(shares) > _SHOWN:
            yield line(f"  … {count(len(shares) - _SHOWN + 1, 'file')} more", solid=True)
        yield _share(share, width)
    yield line(f"  largest {size(answer.largest)}, smallest {size(answer.smallest)}", hang=4)


def _share(share: RankShare, width: int) -> Line:
    return line(
        f"  {share.file:<{width}}  {size(share.n_bytes):>9}  {share.n_entries:>7,}  "
        f"{share.n_reads:>7,}",
        solid=True,
    )


def convert_lines(answer: Converted) -> list[Line]:
    """That the folder is there, or why it is not."""
    if not answer.written:
        head = line(Span(answer.message, "bad"), hang=2)
        findings = section(finding_lines(answer.report.findings))
        return [head, EMPTY, *findings, *next_line(answer.next_command)]
    lines = [
        line(Span("converted", "good"), " ", Span(answer.target, "name"), solid=True),
        line(f"  from {answer.source}", solid=True),
        line(f"  {answer.message}", hang=4),
        line(f"  {count(answer.n_files, 'file')}, {exact_size(answer.n_bytes)}", hang=4),
    ]
    return [
        *lines,
        EMPTY,
        *section(finding_lines(answer.findings)),
        *next_line(answer.next_command),
    ]


def diff_lines(answer: Diff) -> list[Line]:
    """Whether the steps are the same, and what differs."""
    style: Style = "good" if answer.same else "bad"
    real = [one for one in answer.differences if one.what != "layout"]
    lines = [
        line(Span("same" if answer.same else "differ", style), f": {answer.message}", hang=2),
        line("  a: ", Span(answer.a, "name"), solid=True),
        line("  b: ", Span(answer.b, "name"), solid=True),
    ]
    if answer.n_layouts:
        lines.append(line(f"  {count(answer.n_layouts, 'tensor')} cut differently", hang=4))
    if answer.values_compared:
        how = f"{answer.n_by_checksum:,} by checksum, {answer.n_by_bytes:,} by bytes"
        lines.append(line(f"  values of tensors compared: {how}", hang=4))
    else:
        lines.append(line("  values were not compared", hang=4))
    return [*lines, EMPTY, *section(map(_difference, real)), *next_line(answer.next_command)]


def _difference(one: Difference) -> Line:
    if one.what.startswith("only"):
        return line(f"  {one.what.replace('-', ' ')}: {one.fqn}, {one.a or one.b}", hang=4)
    return line(f"  {one.what}: {one.fqn}: {one.a} in a, {one.b} in b", hang=4)
