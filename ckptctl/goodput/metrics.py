"""Write the history of runs in the text format of Prometheus.

Names follow its conventions: a prefix, base units, `_total` for what only grows. A figure that was
not recorded has no sample. Source: https://prometheus.io/docs/practices/naming/ and
https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptctl.goodput.history import RunHistory
from ckptctl.goodput.timeline import BUCKETS, Goodput, PastAttempt


class _Family(NamedTuple):
    help: str
    kind: str


_FAMILIES: Mapping[str, _Family] = {
    "ckptctl_run_up": _Family("Whether the record of the run could be read.", "gauge"),
    "ckptctl_run_elapsed_seconds": _Family(
        "Time from the start of the first attempt to the end of the last.", "gauge"
    ),
    "ckptctl_run_goodput_seconds": _Family("Training that is kept.", "gauge"),
    "ckptctl_run_goodput_ratio": _Family(
        "Training that is kept, as a share of the time that counts.", "gauge"
    ),
    "ckptctl_run_ettr_ratio": _Family(
        "Effective training time ratio: training that is kept, as a share of all time.", "gauge"
    ),
    "ckptctl_run_badput_seconds": _Family(
        "Time that was not training that is kept, by bucket of ml-goodput-measurement.", "gauge"
    ),
    "ckptctl_run_disruptions_total": _Family("How often training had to start again.", "counter"),
    "ckptctl_run_failures_total": _Family("Attempts that failed.", "counter"),
    "ckptctl_run_mtbf_seconds": _Family("Running time per failure.", "gauge"),
    "ckptctl_run_slow_ranks": _Family("Ranks that were slow when the last attempt ended.", "gauge"),
    "ckptctl_run_max_productive_step": _Family("Newest training step that is kept.", "gauge"),
}


def metrics_text(found: RunHistory) -> str:
    """The metrics of every root, grouped by name as the format demands."""
    samples: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    for each in found.roots:
        own = [attempt for attempt in found.attempts if attempt.root == each.root]
        for name, labels, value in _values(each.goodput, own):
            if value is not None:
                samples[name].append(f"{name}{_labels({'root': each.root, **labels})} {value:.12g}")
    return "".join(
        f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
        + "".join(f"{sample}\n" for sample in samples[name])
        for name, family in _FAMILIES.items()
        if samples[name]
    )


def _values(
    goodput: Goodput | None, attempts: Sequence[PastAttempt]
) -> Iterator[tuple[str, dict[str, str], float | None]]:
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
    if attempts:
        yield "ckptctl_run_slow_ranks", {}, float(len(attempts[-1].slow))
    step = goodput.max_productive_step
    yield "ckptctl_run_max_productive_step", {}, None if step is None else float(step)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
