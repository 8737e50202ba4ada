"""Write what a command found in the text format of Prometheus: `--metrics`.

Names follow its conventions: a prefix, base units, `_total` for what only grows. A figure that was
not recorded has no sample. Source: https://prometheus.io/docs/practices/naming/ and
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.cli.output import replace_text
from ckptctl.findings import Verdict

if TYPE_CHECKING:
    from ckptctl.goodput.history import RunHistory
    from ckptctl.goodput.timeline import Goodput
    from ckptctl.selection.picking import Scan
    from ckptctl.selection.watching import Event


_FAMILIES: Mapping[str, str] = {
    "ckptctl_run_up": "Whether the record of the run could be read.",
    "ckptctl_run_elapsed_seconds": "Time from the start of the first attempt to the end of the "
    "last.",
    "ckptctl_run_goodput_seconds": "Training that is kept.",
    "ckptctl_run_goodput_ratio": "Training that is kept, as a share of the time that counts.",
    "ckptctl_run_ettr_ratio": "Effective training time ratio: training that is kept, as a share "
    "of all time.",
    "ckptctl_run_badput_seconds": "Time that was not training that is kept, by bucket of "
    "ml-goodput-measurement.",
    "ckptctl_run_disruptions_total": "How often training had to start again.",
    "ckptctl_run_failures_total": "Attempts that failed.",
    "ckptctl_run_mtbf_seconds": "Running time per failure.",
    "ckptctl_run_max_productive_step": "Newest training step that is kept.",
    "ckptctl_root_exit_code": "Exit code of the last scan that answered.",
    "ckptctl_root_steps": "Steps in the root.",
    "ckptctl_root_inspected_steps": "Inspected steps, by verdict.",
    "ckptctl_root_newest_step": "Number of the newest inspected step.",
    "ckptctl_root_chosen_step": "Number of the step that pick takes.",
    "ckptctl_root_chosen_written_timestamp_seconds": "When the step that pick takes was written.",
    "ckptctl_root_inspected_timestamp_seconds": "When the root was inspected.",
    "ckptctl_watch_events_total": "Steps that watch reported, by event.",
    "ckptctl_watch_newest_step": "Number of the newest such step.",
    "ckptctl_watch_listed_timestamp_seconds": "When the root last answered, and its due steps "
    "were read.",
}
"""What each family is; those of `_total` are counters, all others gauges."""


class Sample(NamedTuple):
    """One value of one family; None where it is not known."""

    name: str
    labels: Mapping[str, str]
    value: float | None


def write_metrics(path: str, samples: Iterable[Sample]) -> None:
    """Replace the file of `--metrics`, whole."""
    replace_text(path, metrics_text(samples), "the metrics")


def metrics_text(samples: Iterable[Sample]) -> str:
    """The samples that have a value, grouped by name as the format demands."""
    found: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    for sample in samples:
        # An integer may be larger than any float: then the figure is not known.
        if sample.value is not None and abs(sample.value) < sys.float_info.max:
            found[sample.name].append(f"{sample.name}{_labels(sample.labels)} {sample.value:.12g}")
    return "".join(
        f"# HELP {name} {about}\n"
        f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
        + "".join(f"{sample}\n" for sample in found[name])
        for name, about in _FAMILIES.items()
        if found[name]
    )


def history_samples(found: RunHistory) -> Iterator[Sample]:
    """The figures of every run."""
    for root in found.roots:
        for name, labels, value in _values(root.goodput):
            yield Sample(name, {"root": root.root, **labels}, value)


def root_samples(found: Scan) -> Iterator[Sample]:
    """What `scan` found of a root, and of the step that `pick` takes."""
    root = {"root": found.root}
    yield Sample("ckptctl_root_exit_code", root, found.exit_code)
    yield Sample("ckptctl_root_steps", root, found.n_steps)
    verdicts = Counter(report.verdict for report in found.reports)
    for verdict in Verdict:
        yield Sample(
            "ckptctl_root_inspected_steps", {**root, "verdict": verdict.value}, verdicts[verdict]
        )
    newest = [report.number for report in found.reports if report.number is not None]
    yield Sample("ckptctl_root_newest_step", root, max(newest, default=None))
    for report in found.reports:
        if report.url == found.chosen:
            yield Sample("ckptctl_root_chosen_step", root, report.number)
            yield Sample("ckptctl_root_chosen_written_timestamp_seconds", root, report.written_s)
    yield Sample("ckptctl_root_inspected_timestamp_seconds", root, round(time.time()))


def watch_samples(
    root: str, counts: Mapping[Event, int], newest: Mapping[Event, int]
) -> Iterator[Sample]:
    """What `watch` found since it was started: how often, and the newest step of each event."""
    for event, n_found in counts.items():
        labels = {"root": root, "event": event.value}
        yield Sample("ckptctl_watch_events_total", labels, n_found)
        yield Sample("ckptctl_watch_newest_step", labels, newest.get(event))
    yield Sample("ckptctl_watch_listed_timestamp_seconds", {"root": root}, round(time.time()))


def _values(goodput: Goodput | None) -> Iterator[tuple[str, dict[str, str], float | None]]:
    from ckptctl.goodput.timeline import BUCKETS

    yield "ckptctl_run_up", {}, float(goodput is not None)
    if goodput is None:
        return
    yield "ckptctl_run_elapsed_seconds", {}, goodput.elapsed_s
    yield "ckptctl_run_goodput_seconds", {}, goodput.goodput_s
    yield "ckptctl_run_goodput_ratio", {}, goodput.goodput
    yield "ckptctl_run_ettr_ratio", {}, goodput.ettr
    for bucket in BUCKETS:
        seconds: float | None = getattr(goodput.badput, bucket)
        yield "ckptctl_run_badput_seconds", {"bucket": bucket}, seconds
    yield "ckptctl_run_disruptions_total", {}, float(goodput.disruptions)
    yield "ckptctl_run_failures_total", {}, float(goodput.mtbf.failures)
    yield "ckptctl_run_mtbf_seconds", {}, goodput.mtbf.mean_s
    step = goodput.max_productive_step
    yield "ckptctl_run_max_productive_step", {}, None if step is None else float(step)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
