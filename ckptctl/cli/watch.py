"""`ckptctl watch`: verify and seal each step that a job saves, from a process beside it."""

from __future__ import annotations

from typing import Annotated

import ckptctl
from ckptctl.cli.notifying import Notifier
from ckptctl.cli.options import (
    AcceptAsItIsOpt,
    AlarmAfterOpt,
    JobsOpt,
    MetricsOpt,
    NotifyOpt,
    only,
)
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import Line, StyledText, line, next_line
from ckptctl.errors import OptionError
from ckptctl.formatting import duration
from ckptctl.options import Parameter, Requirements, StorageOptions
from ckptctl.selection.watching import ALARM_AFTER, BYTES_PER_S, INTERVAL_S, Event, Watched

EXAMPLES = (
    "ckptctl watch /shared/ckpt/run-1234 --notify 'curl -fsS --data-binary @- https://example.org'",
    "ckptctl watch s3://bucket/run-1234 --bandwidth 400M --accept-unverifiable",
    "ckptctl watch /shared/ckpt/run-1234 --once --grace 300 --notify /usr/local/bin/page",
)
EXIT_CODES = (0, 2, 10, 20, 21, 22, 23, 25, 36, 75, 77)


def watch(
    root: Annotated[str, Parameter("ROOT", "Folder or URL that holds the steps of a run.")],
    once: Annotated[
        bool,
        Parameter("--once", "List the root once, and finish what an earlier watch saw; for cron."),
    ] = False,
    interval: Annotated[
        float, Parameter("--interval TIME", "The pause between two listings of the root.")
    ] = INTERVAL_S,
    bandwidth: Annotated[
        int, Parameter("--bandwidth SIZE", "How many bytes are read per second at most.")
    ] = BYTES_PER_S,
    alarm_after: AlarmAfterOpt = ALARM_AFTER,
    notify: NotifyOpt = None,
    metrics: MetricsOpt = None,
    accept_unverifiable: AcceptAsItIsOpt = False,
    jobs: JobsOpt = None,
    *,
    requirements: Annotated[
        Requirements, only("pattern", "state", "grace", "key_file", "sign", "marks")
    ],
    storage: StorageOptions,
    out: Output,
) -> int:
    """Verify and seal each step that a job finishes, from a process beside it.

    A step is read once two listings, --grace apart, show the same files, and sealed if every byte
    is proven and it holds what the step before it holds. Nothing else is written into a step. A
    damaged step is reported once, and so is that no newer step is proven for --alarm-after save
    intervals. Ends with 0 after SIGTERM; with --once with the exit code of the newest damaged or
    unverifiable step, with 36 where a newer step is overdue, or with 10 where the root does not
    exist. With --json
    each event is one line, with --quiet only the addresses of damaged steps are printed.
    """
    from ckptctl.cli.main import Stopped

    if bandwidth < 1:
        raise OptionError("--bandwidth", f"is {bandwidth}; it must be 1 or more")
    if not interval:
        raise OptionError("--interval", "is 0; the storage would be listed all the time")
    exit_code = 0
    counts = dict.fromkeys(Event, 0)
    newest: dict[Event, int] = {}

    def listed() -> None:
        if metrics is not None:
            from ckptctl.cli.metrics import watch_samples, write_metrics

            write_metrics(metrics, watch_samples(root, counts, newest))

    events = ckptctl.watch(
        root,
        once=once,
        interval_s=interval,
        bytes_per_s=bandwidth,
        accept_unverifiable=accept_unverifiable,
        alarm_after=alarm_after,
        jobs=jobs,
        on_listed=listed,
        requirements=requirements,
        storage=storage,
    )
    if not once:
        grace = duration(requirements.grace_s)
        begun = f"watching {root}: a step is read once it has not changed for {grace}; Ctrl-C ends"
        out.say(line(begun, hang=2))
    with Notifier(notify, out) as notifier:
        try:
            for found in events:
                exit_code = exit_code or found.exit_code
                counts[found.event] += 1
                if found.number is not None:
                    newest[found.event] = max(found.number, newest.get(found.event, 0))
                # First the notification: whoever reads the line may end the watch.
                if found.event in (Event.DAMAGED, Event.OVERDUE):
                    notifier.send(document_of("watched", found))
                _print(found, out)
        except Stopped:
            if once:
                raise
            return 0
    if out.talks and not any(counts.values()):
        out.lines([line("nothing to report; a step is read once it has not changed for --grace")])
    return exit_code


def _print(found: Watched, out: Output) -> None:
    if out.as_json:
        out.document_line(document_of("watched", found))
    elif out.quiet:
        if found.event is Event.DAMAGED:
            out.lines([line(StyledText(found.url or "", "name"), solid=True)])
    else:
        out.lines(watched_lines(found))


def watched_lines(found: Watched) -> list[Line]:
    """One event: what was found of which step, and what to run next."""
    word = StyledText(found.event.value, "good" if found.event is Event.SEALED else "bad")
    head = line(word, " ", StyledText(found.url or found.root, "name"), solid=True)
    return [head, line(f"  {found.message}", hang=4), *next_line(found.next_command)]
