"""What do the metrics of an MLflow run come to, put together by step?

MLflow keeps one file a metric, `metrics/NAME`, with a line for each value: time in
milliseconds, value, step. They are merged by time into JSON lines, which the reader
of those takes. A run that was resumed appends, so steps logged twice are there twice.

Source: MLflow 2 `store/tracking/file_store.py`.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterator

_LINE = re.compile(r"(?P<at>\d{1,16}) (?P<value>\S+) (?P<step>-?\d+)\s*")
_MAX_METRICS = 500
_PIECE_LINES = 4_000


def metrics_folder(path: str) -> str | None:
    """The folder of metrics of the run at `path`, which may be that folder itself."""
    inside = os.path.join(path, "metrics")
    if os.path.isfile(os.path.join(path, "meta.yaml")) and os.path.isdir(inside):
        return inside
    above = os.path.join(os.path.dirname(os.path.abspath(path)), "meta.yaml")
    named = os.path.basename(os.path.abspath(path)) == "metrics"
    return path if named and os.path.isdir(path) and os.path.isfile(above) else None


def metric_store_pieces(path: str) -> Iterator[bytes]:
    """JSON lines of all metrics, oldest first, in pieces."""
    folder = metrics_folder(path) or path
    names = [
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, files in os.walk(folder)
        for name in files
        # The machine's own figures are no rows of the training.
        if not os.path.relpath(at, folder).startswith("system")
    ]
    lines: list[bytes] = []
    merged = heapq.merge(*(_values(folder, name) for name in sorted(names)[:_MAX_METRICS]))
    for at, step, name, value in merged:
        record = {"timestamp": str(at), "step": str(step), name: value}
        lines.append(json.dumps(record).encode() + b"\n")
        if len(lines) >= _PIECE_LINES:
            yield b"".join(lines)
            lines = []
    yield b"".join(lines)


def _values(folder: str, name: str) -> Iterator[tuple[int, int, str, str]]:
    with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
        for line in file:
            match = _LINE.fullmatch(line)
            if match is not None:
                yield int(match["at"]), int(match["step"]), name, match["value"]
