"""Logs that a collector wrapped are read as those of the program: losses, resumes and causes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.failures.classifying import classify
from ckptctl.logs.collectors import Unwrapper
from ckptctl.logs.reading import LogReader
from ckptctl.logs.rows import Marker, Row
from ckptctl.loss.checking import check_loss

DATA = Path(__file__).parent / "data"
SAMPLES = json.loads((DATA / "samples.json").read_text())
BEGAN = datetime(2026, 11, 20, 3, 12, 44, tzinfo=UTC)


def at(number: int) -> datetime:
    return BEGAN + timedelta(seconds=1.3 * number)


def iso(number: int) -> str:
    return f"{at(number):%Y-%m-%dT%H:%M:%S.%f}Z"


def ms(number: int) -> int:
    return round(at(number).timestamp() * 1e3)


def ndjson(records: Sequence[object]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def docker(lines: Sequence[str]) -> bytes:
    return ndjson(
        [
            {"log": f"{line[begin : begin + 16384]}", "stream": "stdout", "time": iso(n)}
            for n, each in enumerate(lines)
            for line in [each + "\n"]
            for begin in range(0, len(line), 16384)
        ]
    )


def cri(lines: Sequence[str]) -> bytes:
    parts = (
        (n, line[begin : begin + 30], "P" if begin + 30 < len(line) else "F")
        for n, line in enumerate(lines)
        for begin in range(0, max(1, len(line)), 30)
    )
    return "".join(f"{iso(n)} stdout {tag} {part}\n" for n, part, tag in parts).encode()


def kubectl(lines: Sequence[str], pod: str = "[pod/train-worker-0/main] ") -> bytes:
    return "".join(f"{pod}{iso(n)} {line}\n" for n, line in enumerate(lines)).encode()


def gcp(lines: Sequence[str]) -> list[dict[str, object]]:
    about = {"logName": "projects/p/logs/stdout", "severity": "INFO"}
    return [
        {"insertId": f"i{n}", "textPayload": line, "timestamp": iso(n), **about}
        for n, line in enumerate(lines)
    ]


def gcp_json(lines: Sequence[str]) -> list[dict[str, object]]:
    labels = {"pod_name": "train-0"}
    return [
        {"insertId": f"i{n}", "jsonPayload": {"message": line}, "timestamp": iso(n)}
        | {"resource": {"type": "k8s_container", "labels": labels}}
        for n, line in enumerate(lines)
    ]


def cloudwatch(lines: Sequence[str]) -> list[dict[str, object]]:
    return [
        {"timestamp": ms(n), "message": line, "ingestionTime": ms(n) + 5}
        for n, line in enumerate(lines)
    ]


def journald(lines: Sequence[str]) -> list[dict[str, object]]:
    about = {"_HOSTNAME": "node17", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "train"}
    return [
        {"__CURSOR": "s=1", "__REALTIME_TIMESTAMP": f"{ms(n)}000", "MESSAGE": line, **about}
        for n, line in enumerate(lines)
    ]


def loki(lines: Sequence[str]) -> list[dict[str, object]]:
    labels = {"pod": "train-0"}
    return [{"labels": labels, "line": line, "timestamp": iso(n)} for n, line in enumerate(lines)]


def datadog(lines: Sequence[str]) -> list[dict[str, object]]:
    return [
        {
            "id": f"A{n}",
            "type": "log",
            "attributes": {"message": line, "timestamp": iso(n), "host": "node17"},
        }
        for n, line in enumerate(lines)
    ]


WRAPPERS = {
    "docker": docker,
    "cri": cri,
    "docker in fluent-bit": lambda lines: ndjson(
        [
            {"date": at(n).timestamp(), "log": line.decode(), "kubernetes": {"pod_name": "train-0"}}
            for n, line in enumerate(docker(lines).splitlines())
        ]
    ),
    "kubectl": kubectl,
    "kubectl --timestamps": lambda lines: kubectl(lines, ""),
    "kubectl --prefix": lambda lines: "".join(f"[pod/a-0/main] {x}\n" for x in lines).encode(),
    "gcp": lambda lines: ndjson(gcp(lines)),
    "gcp json": lambda lines: ndjson(gcp_json(lines)),
    "gcp, newest first": lambda lines: ndjson(gcp(lines)[::-1]),
    "gcp document, newest first": lambda lines: json.dumps(gcp(lines)[::-1], indent=2).encode(),
    "cloudwatch": lambda lines: ndjson(cloudwatch(lines)),
    "cloudwatch document": lambda lines: json.dumps(
        {"events": cloudwatch(lines), "nextForwardToken": "f/1"}, indent=4
    ).encode(),
    "cloudwatch insights": lambda lines: ndjson(
        [{"@timestamp": iso(n), "@message": line} for n, line in enumerate(lines)]
    ),
    "journald": lambda lines: ndjson(journald(lines)),
    "loki, newest first": lambda lines: ndjson(loki(lines)[::-1]),
    "loki push": lambda lines: ndjson(
        [
            {
                "streams": [
                    {
                        "stream": {"pod": "train-0"},
                        "values": [[f"{ms(n)}000000", line] for n, line in enumerate(lines)],
                    }
                ]
            }
        ]
    ),
    "datadog": lambda lines: ndjson(datadog(lines)),
    "datadog document": lambda lines: json.dumps({"data": datadog(lines)}).encode(),
    "elasticsearch": lambda lines: json.dumps(
        {
            "hits": {
                "hits": [
                    {"_index": "logs", "_source": {"message": line, "@timestamp": iso(n)}}
                    for n, line in enumerate(lines)
                ]
            }
        }
    ).encode(),
    "structured": lambda lines: ndjson(
        [{"ts": at(n).timestamp(), "level": "error", "msg": line} for n, line in enumerate(lines)]
    ),
    "utf-8 with a mark": lambda lines: "".join(f"{x}\n" for x in lines).encode("utf-8-sig"),
}

INCIDENT = """\
step 12 loss 2.31
Traceback (most recent call last):
  File "/job/train.py", line 3, in main
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total \
capacity of 79.10 GiB of which 100.00 MiB is free.""".splitlines()


def rows_of(data: bytes) -> list[Row]:
    reader = LogReader("train.log")
    found: list[Row | Marker] = [*reader.feed(data), *reader.end()]
    return [row for row in found if isinstance(row, Row)]


def key(row: Row) -> tuple[object, ...]:
    return row.step, None if row.loss is None else row.loss.value


def resumed() -> Iterator[str]:
    noise = random.Random(1)
    for begin, end in ((1, 130), (121, 200)):
        if begin > 1:
            yield "Resuming from step 120"
        for step in range(begin, end):
            loss = 3 - step / 200 + random.Random(step).gauss(0, 0.01)
            yield f"step {step} loss {loss:.5f} lr 0.0003 time {noise.random():.3f}"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_resume_in_a_wrapped_log_is_continuous(tmp_path, wrapper):
    log = tmp_path / "train.log"
    log.write_bytes(WRAPPERS[wrapper]([*resumed()]))
    assert check_loss([str(log)]).verdict.value == "continuous"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_cause_in_a_wrapped_log_is_found(tmp_path, wrapper):
    log = tmp_path / "train.log"
    log.write_bytes(WRAPPERS[wrapper](INCIDENT))
    found = classify([str(log)])
    assert found.failure == "job-oom"
    assert found.evidence[0].text.startswith("torch.OutOfMemoryError: CUDA out of memory")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_rows_of_every_format_are_those_of_the_program(wrapper):
    differ = {}
    for number, sample in enumerate(SAMPLES):
        if sample["format"] == "trainer-state":
            continue
        lines = "\n".join(sample["lines"]).split("\n")
        plain = rows_of("".join(f"{line}\n" for line in lines).encode())
        wrapped = rows_of(WRAPPERS[wrapper](lines))
        if [*map(key, wrapped)] != [*map(key, plain)]:
            differ[number, sample["format"]] = [*map(key, plain)], [*map(key, wrapped)]
    assert differ == {}


def unwrapped(data: bytes, length: int = 1 << 20) -> bytes:
    unwrapper = Unwrapper()
    pieces = [data[begin : begin + length] for begin in range(0, len(data), length)]
    return b"".join(map(unwrapper.feed, pieces)) + unwrapper.end()


@pytest.mark.parametrize("sample", range(len(SAMPLES)))
def test_a_log_that_no_collector_wrote_passes_through(sample):
    data = "".join(f"{line}\n" for line in SAMPLES[sample]["lines"]).encode()
    for text in (data, data[:-1], data * 50):
        assert unwrapped(text) == text


@given(st.binary(max_size=500), st.integers(1, 70))
def test_no_bytes_are_lost_or_reordered_however_they_are_cut(data, length):
    assert unwrapped(data, length) == unwrapped(data)
    if data.isascii() and not data.lstrip().startswith((b"{", b"[")) and b"\0" not in data:
        assert unwrapped(data) == data


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_log_may_be_cut_anywhere(wrapper):
    data = WRAPPERS[wrapper]([*resumed()][:30])
    assert unwrapped(data, 7) == unwrapped(data)
    lines = [line for line in unwrapped(data).decode().splitlines() if line.strip()]
    assert [line[line.index("step") :] for line in lines] == [*resumed()][:30]


def test_the_lines_of_a_wrapped_log_keep_their_numbers(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(cri(INCIDENT))
    number = len(log.read_text().splitlines())
    assert classify([str(log)]).evidence[0].line == number


def test_the_record_of_a_program_is_no_record_of_a_collector(tmp_path):
    record = {"message": "failed", "exc_info": "Traceback", "level": "ERROR", "service": "train"}
    data = ndjson([record, {"loss": 2.5, "step": 3, "message": "train", "tags": []}])
    assert unwrapped(data) == data


def test_several_pods_in_one_log_are_ranks_that_repeat_each_other(tmp_path):
    log = tmp_path / "train.log"
    both = zip(
        kubectl([*resumed()]).splitlines(),
        kubectl([*resumed()], "[pod/train-worker-1/main] ").splitlines(),
        strict=True,
    )
    log.write_bytes(b"".join(line + b"\n" for lines in both for line in lines))
    assert check_loss([str(log)]).verdict.value == "continuous"


def test_the_severity_that_a_collector_derives_from_the_stream_is_not_that_of_the_line(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(ndjson(gcp(INCIDENT)))  # what is printed on standard output has INFO
    assert classify([str(log)]).failure == "job-oom"


def test_a_line_of_the_kernel_in_the_journal_is_one(tmp_path):
    log = tmp_path / "journal.json"
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
    record = {"__CURSOR": "s", "SYSLOG_IDENTIFIER": "kernel", "_HOSTNAME": "node17"}
    log.write_bytes(ndjson([{**record, "MESSAGE": line, "__REALTIME_TIMESTAMP": f"{ms(1)}000"}]))
    found = classify([str(log)])
    assert (found.failure, found.confidence) == ("infra-node", "high")
    assert found.nodes == ("node17",)


def test_a_message_that_is_not_utf_8_is_a_list_of_bytes_in_the_journal():
    data = ndjson([{"__CURSOR": "s", "MESSAGE": [*"step 3 \xff".encode("latin-1")]}])
    assert unwrapped(data).startswith(b"step 3 ")
