"""`--notify` and `--metrics`: what leaves the machine, by real commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from command_line import clean_environment, run_ckptctl, validated

EXAMPLES = Path(__file__).parents[2] / "examples" / "notify"
SECRET = "T0/B1/very-secret"


class Receiver(NamedTuple):
    """A command that keeps what it gets, a document a line."""

    command: str
    file: Path

    @property
    def got(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []


@pytest.fixture
def receiver(tmp_path) -> Receiver:
    folder = tmp_path / "receiver"
    folder.mkdir()
    script, file = folder / "keep", folder / "got"
    script.write_text(f"#!/bin/sh\n(cat; echo) >> {file}\n")
    script.chmod(0o755)
    return Receiver(f"{script} --token {SECRET}", file)


def failing_run(root: Path, url: str, *words: str):
    root.mkdir(exist_ok=True)
    job = ("--", sys.executable, "-c", "raise SystemExit(9)")
    limits = ("--max-restarts", 1, "--backoff", "0s")
    return run_ckptctl("run", "--root", root, *limits, "--notify", url, *words, *job)


def test_a_run_sends_each_failed_attempt_and_its_end(tmp_path, receiver):
    done = failing_run(tmp_path / "run", receiver.command)
    assert done.returncode == 93, done.stderr
    sent = [validated(body) for body in receiver.got]
    assert [each["schema"] for each in sent] == ["ckptctl.attempt/1", "ckptctl.supervised/1"]
    assert (sent[0]["attempt"]["exit_code"], sent[0]["ok"]) == (9, False)
    assert sent[-1]["exit_code"] == 93
    assert "warning: --notify" not in done.stderr


def test_a_command_that_fails_is_named_without_its_arguments(tmp_path, receiver):
    done = failing_run(tmp_path / "run", f"false {SECRET}")
    assert "warning: --notify false ended with 1" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_no_command_that_is_printed_has_the_secret(tmp_path, receiver):
    absent = tmp_path / "missing"
    for words in (
        ("watch", tmp_path, "--interval", "soon", "--notify", receiver.command),
        ("watch", absent, "--once", f"--notify={receiver.command}", "--no-such-option"),
        ("--json", "run", "--root", absent, "--notify", receiver.command, "--", "true"),
    ):
        done = run_ckptctl(*words)
        assert done.returncode, words
        assert SECRET not in done.stdout + done.stderr


def test_an_error_that_ends_a_command_is_sent(tmp_path, receiver):
    done = run_ckptctl(
        "run", "--root", tmp_path / "missing", "--notify", receiver.command, "--", "true"
    )
    (sent,) = receiver.got
    assert done.returncode == validated(sent)["exit_code"] != 0


def test_a_runbook_that_stops_is_sent(tmp_path, framework_roots, receiver):
    root = shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", tmp_path / "run")
    for metadata in root.glob("*/.metadata"):
        metadata.unlink()
    log = tmp_path / "train.log"
    log.write_text("step: 1 loss: 2.0\n")
    done = run_ckptctl(
        *("runbook", "run", "rb-7", root, "--yes", "--dry-run", "--set", f"LOG={log}"),
        *("--notify", receiver.command),
    )
    (sent,) = receiver.got
    assert validated(sent)["exit_code"] == done.returncode != 0


def test_success_is_not_sent(tmp_path, receiver):
    (tmp_path / "run").mkdir()
    done = run_ckptctl(
        "run", "--root", tmp_path / "run", "--notify", receiver.command, "--", "true"
    )
    assert (done.returncode, receiver.got) == (0, [])


@pytest.mark.parametrize(
    "given",
    ["", "'", "https://", "https://user:very-secret@host/T0/very-secret"],
)
def test_a_receiver_that_cannot_be_one_ends_with_2(tmp_path, given):
    done = run_ckptctl("run", "--root", tmp_path, "--notify", given, "--", "true")
    assert done.returncode == 2
    assert "--notify" in done.stderr
    assert "very-secret" not in done.stdout + done.stderr


class Webhook(HTTPServer):
    """A webhook that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(body.decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", ["slack", "pagerduty"])
def test_the_examples_send_what_their_receiver_takes(tmp_path, receiver, webhook, name):
    failing_run(tmp_path / "run", receiver.command)
    attempt, *_, end = receiver.got
    environment = clean_environment(
        SLACK_WEBHOOK_URL=webhook.url, PAGERDUTY_URL=webhook.url, PAGERDUTY_ROUTING_KEY="key"
    )
    example = [sys.executable, EXAMPLES / f"{name}.py"]
    for document in (attempt, end):
        subprocess.run(example, input=document, text=True, env=environment, check=True)
    sent = [json.loads(body) for body in webhook.got]
    if name == "slack":
        assert [each.keys() for each in sent] == [{"text"}, {"text"}]
        assert sent[1]["text"].startswith(f"*{tmp_path}/run*: ")
        assert "`ckptctl " in sent[1]["text"]
    else:
        assert [each["payload"]["severity"] for each in sent] == ["warning", "critical"]
        assert {each["routing_key"] for each in sent} == {"key"}


SAMPLE = re.compile(r'ckptctl_[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? -?[0-9.e+]+')


def samples_in(path: Path) -> dict[str, float]:
    """The samples of a file by name and labels, after each line was held against the format."""
    found = {}
    for line in path.read_text().splitlines():
        if not line.startswith("# "):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_the_metrics_say_what_the_commands_say(tmp_path, framework_roots):
    root = shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", tmp_path / "run")
    (root / "step_30" / ".metadata").unlink()
    file = tmp_path / "ckptctl.prom"
    done = run_ckptctl("scan", root, "--metrics", file, "--json")
    scanned, found = validated(done.stdout), samples_in(file)
    at = f'{{root="{root}"}}'
    assert found[f"ckptctl_root_steps{at}"] == scanned["n_steps"] == 3
    assert found[f"ckptctl_root_chosen_step{at}"] == 20
    assert found[f"ckptctl_root_newest_step{at}"] == 30
    assert found[f'ckptctl_root_inspected_steps{{root="{root}",verdict="incomplete"}}'] == 1
    for _ in range(2):
        run_ckptctl("watch", root, "--once", "--grace", 0, "--metrics", file)
    found = samples_in(file)
    assert found[f'ckptctl_watch_events_total{{root="{root}",event="sealed"}}'] == 2
    assert found[f'ckptctl_watch_newest_step{{root="{root}",event="damaged"}}'] == 30
    assert not list(tmp_path.glob("*.tmp"))


def test_a_command_that_knows_nothing_leaves_the_metrics(tmp_path):
    pytest.importorskip("s3fs")
    file = tmp_path / "ckptctl.prom"
    file.write_text("# HELP ckptctl_before\n")
    done = run_ckptctl("scan", "s3://bucket/run", "--metrics", file)  # without credentials
    assert done.returncode == 77, done.stderr
    assert file.read_text() == "# HELP ckptctl_before\n"
