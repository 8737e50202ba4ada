"""Secrets of options, variables and addresses appear in nothing that a command writes.

A canary is planted in every option of the option tables that takes text and in the variables of
ckptctl and of the clients of storages; everything that is written is searched: streams, documents,
pages, records, and the arguments of processes that are started.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import threading
import warnings
from base64 import b64encode
from contextlib import redirect_stderr
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
from command_line import run_ckptctl
from every_case import all_cases

from ckptctl import redaction
from ckptctl.cli.commands import COMMANDS, command_of
from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.options import Requirements, StorageOptions
from ckptctl.redaction import SECRET_OPTIONS, RedactedStream, redacted, shell_command
from ckptctl.storage.opening import check_address

CANARY = "CaNaRy+9f/3=x&Zq"
"""It has characters that addresses, JSON and shells write in another way."""

HARMLESS = {
    "a path or an address, in which what is secret is hidden or refused": (
        *("--evidence-dir", "--flight-recorder", "--hosts-file"),
        *("--key-file", "--log", "--log-dir", "--marks", "--metrics", "--node-report"),
        *("--optional-root", "--other-root", "--plot", "--report", "--resume-report", "--root"),
        *("--state", "--transcript", "--work", "--endpoint-url", "--ignore"),
        *("--follow-links", "--resume-from", "--config", "--contract"),
        *("--sign", "--require-signature"),
    ),
    "a time, a size, a number, a code or a word of a list": (
        *("--backoff", "--bandwidth", "--compile", "--connect", "--deadline", "--exit-code"),
        *("--fault", "--file-size", "--format", "--hang-after", "--interval", "--load", "--memory"),
        *("--mtbf", "--no-restart-on", "--only", "--out-of-section-timeout", "--patience"),
        *("--require", "--reschedule", "--resume", "--save-time", "--section-timeouts", "--skip"),
        *("--subset", "--wait-storage", "--world-sizes"),
    ),
    "a name that the answer is about": (
        *("--key", "--nodes", "--other-nodes", "--pattern", "--root-env", "--accept-drift"),
        *("--strip", "--under", "--node-probe", "--allow-globals", "--seal-run"),
        "--owners",
    ),
    "words of a person that a record keeps for others": (
        *("--by", "--evidence", "--reason", "--reset-budget", "--adopt"),
    ),
}
"""The options that take text and whose values are shown, by the reason."""


def options(command: str) -> list[Any]:
    return [each for each in command_of(command).params if each.param_type_name == "option"]


def text_options(command: str) -> list[str]:
    """The options of a command that take text, by their names on the command line."""
    return [each.opts[0] for each in options(command) if each.type.name == "str"]


def test_every_option_that_takes_text_is_known_to_be_harmless_or_hidden():
    known = {name for names in HARMLESS.values() for name in names}
    every = {name for command in COMMANDS for name in text_options(command)}
    # Whoever adds an option writes here why its value may be shown.
    assert known == every - SECRET_OPTIONS
    assert every >= SECRET_OPTIONS


VALUES = {
    "--storage-option": (
        f"secret={CANARY}",
        f"connection_string=AccountName=a;AccountKey={CANARY};EndpointSuffix=x",
        f"sas_token=?sv=2022-11-02&sig={quote(CANARY, safe='')}",
        f"credential={CANARY}",
        f"client_kwargs={json.dumps({'headers': {'Authorization': CANARY}, 'region_name': 'eu'})}",
        f"auth={json.dumps(['user', CANARY])}",
        f"unheard_of={CANARY}",
    ),
    "--notify": (f"curl http://127.0.0.1:9/{quote(CANARY, safe='')}", f"false --token {CANARY}"),
    "--launcher": (f"false --token {CANARY}", f"false --token={CANARY}"),
    "--exclude-command": (f"false --token {CANARY}", f"false TOKEN={CANARY}"),
    "--set": (f"RESUME=sbatch --token {CANARY} job.sh", f"RESUME=TOKEN={CANARY} ./job"),
}
"""Values with a canary of each option that may hold a secret."""

ARGUMENTS = {
    "accept": "{step}",
    "classify": "{log}",
    "convert": "{step} {work}/out",
    "cost": "{root}",
    "data": "{root}",
    "diff": "{step} {step}",
    "doctor": "storage {root}",
    "drill": "--root {root} --work {work}/drill -- true",
    "explain": "75",
    "history": "{root}",
    "loss": "{log}",
    "pick": "{root}",
    "confirm": "{step} --reason good",
    "pin": "{step}",
    "preflight": "{root}",
    "prune": "{root} --keep 2",
    "reject": "{step} --reason bad",
    "rerun": "--root {root} --work {work}/rerun -- true",
    "reshard": "{step} {work}/out --world-size 2",
    "run": "--root {root} --max-restarts 0 --state {work}/state --log-dir {work}/logs -- false",
    "runbook": "run rb-7 {root} --yes --dry-run --set LOG={log} --transcript {work}/transcript",
    "scan": "{root} --metrics {work}/scan.prom",
    "seal": "{step} --replace",
    "show": "{step}",
    "verify": "{step}",
    "watch": "{root} --once",
}
"""Arguments with which each command answers."""

ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "AWS_SESSION_TOKEN": f"session-{CANARY}",
    "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey={CANARY};X=y",
    "AZURE_STORAGE_SAS_TOKEN": f"?sv=2022&sig={quote(CANARY, safe='')}",
    "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"private_key": CANARY}),
    "CKPTCTL_SEAL_KEY": f"{CANARY}-0123456789abcdef",
    "CKPTCTL_SIGN_PASSWORD": CANARY,
    "CKPTCTL_UNHEARD_OF": CANARY,
    "HTTPS_PROXY": f"http://user:{quote(CANARY, safe='')}@127.0.0.1:9",
}


def forms(secret: str = CANARY) -> set[str]:
    """What must not be found of a secret."""
    basic = b64encode(f"user:{secret}".encode()).decode()
    return {secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], basic}


def leaks(*texts: str, folder: Path | None = None) -> list[str]:
    """Where the canary is: a line of a text, or a file."""
    found = [
        line
        for text in texts
        for line in text.splitlines()
        if any(form in line for form in forms())
    ]
    files = folder.rglob("*") if folder is not None else ()
    for file in files:
        data = file.read_bytes() if file.is_file() else b""
        found += [str(file)] if any(form.encode() in data for form in forms()) else []
    return found


@pytest.fixture
def places(checkpoints: Path, tmp_path: Path) -> dict[str, str]:
    import shutil

    root = Path(shutil.copytree(checkpoints / "run_fsdp4", tmp_path / "run"))
    work = tmp_path / "work"
    work.mkdir()
    log = tmp_path / "train.log"
    log.write_text("".join(f"step: {n} loss: 2.{n:03}\n" for n in range(1, 40)))
    return {"root": str(root), "step": f"{root}@500", "log": str(log), "work": str(work)}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_secret_of_an_option_is_written(command, places, tmp_path):
    words = [word.format_map(places) for word in ARGUMENTS[command].split()]
    missing = [word.replace(places["root"], f"{places['work']}/missing") for word in words]
    own, dashes, job = [*words, "--"], [], []
    if "--" in words:
        at = words.index("--")
        own, job = words[:at], words[at:]
        missing = missing[:at]
    else:
        own = words
    report = ["--report", str(tmp_path / "work" / "report.json")]
    secret = [name for name in text_options(command) if name in SECRET_OPTIONS]
    with all_cases() as case:
        for number, option in enumerate(secret):
            for value in VALUES[option]:
                ways = [[*own, *report], [*own, "--json", "--unknown"], [*missing, "--debug"]]
                for way in ways[: 3 if number else 2] if value != VALUES[option][0] else ways:
                    given = [option, value]
                    with case((option, value, way)):
                        ran = run_ckptctl(command, *way, *given, *dashes, *job)
                        found = leaks(ran.stdout, ran.stderr, folder=tmp_path)
                        assert not found, found


@pytest.mark.parametrize("command", COMMANDS)
def test_no_secret_of_a_variable_is_written(command, places, tmp_path):
    words = [word.format_map(places) for word in ARGUMENTS[command].split()]
    variables = ENVIRONMENT | {
        each.envvar: VALUES[each.opts[0]][0].replace(" ", r"\u0020")
        for each in options(command)
        if each.envvar is not None
        if each.opts[0] in text_options(command)
        if each.opts[0] in SECRET_OPTIONS and each.opts[0] != "--set"
    }
    at = words.index("--") if "--" in words else len(words)
    with all_cases() as case:
        for way in ([], ["--json", "--report", f"{places['work']}/report.json"], ["--debug"]):
            with case(way):
                ran = run_ckptctl(command, *words[:at], *way, *words[at:], env=variables)
                found = leaks(ran.stdout, ran.stderr, folder=tmp_path)
                assert not found, found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@h/x", "https://***@h/x"),
        ("https://token@h/x", "https://***@h/x"),
        ("http://u:pa/ss@h/x", "http://***@h/x"),
        ("sftp://me:pw@h/x", "sftp://me:***@h/x"),
        ("https://h/x?X-Amz-Signature=ab&versionId=3", "https://h/x?X-Amz-Signature=***&versionId=3"),
        ("az://c/x?sv=2022&se=x&sig=ab", "az://c/x?sv=***&se=***&sig=***"),
        ("s3://b/x?AWSAccessKeyId=A&Expires=1", "s3://b/x?AWSAccessKeyId=***&Expires=***"),
        ("https://h/x#token=Ab1", "https://h/x#***"),
        ("https://h/x?Ab1", "https://h/x?***"),
        ("GET /b/k?X-Amz-Credential=AK/1 HTTP", "GET /b/k?X-Amz-Credential=*** HTTP"),
        ("URL('http://h/x?sig=a%2Fb')", "URL('http://h/x?sig=***')"),
        (
            "u=https%3A%2F%2Fu%3Ap%40h%2Fx%3Fsig%3Dab.",
            "u=https%3A%2F%2F***%40h%2Fx%3Fsig%3D***.",
        ),
    ],
)  # fmt: skip
def test_an_address_loses_what_is_not_known_to_be_harmless(text, shown):
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("s3://b/run@1200", "s3://b@latest", "s3://b/what?/x", "gs://b/x", "http://[::1]:80/x"),
        *("abfss://c@account.dfs.core.windows.net/x", "sftp://me@host/x", "http://127.0.0.1:9"),
        *("see https://docs/page#tensor-names.", "https://h/x?versionId=3", "what? x=1"),
        *("github://org:repo@main/x", "step_1200: 3 of 4 files", "file:///a/b"),
    ],
)
def test_an_address_without_secrets_is_shown_as_it_is(text):
    assert redacted(text) == text


def test_a_value_is_hidden_in_every_form_in_which_it_may_be_written():
    StorageOptions(storage_options={"auth": ["user", CANARY]})
    with all_cases() as case:
        for form in (*forms(), repr(CANARY), shlex.quote(CANARY), CANARY.replace("&", "&amp;")):
            with case(form):
                assert not leaks(redacted(f"<{form}>"))


def test_options_are_typed_by_their_keys_also_within_others():
    storage = StorageOptions(
        storage_options={
            "anon": False,
            "client_kwargs": {"region_name": "eu-west-1", "aws_secret_access_key": CANARY},
            "config_kwargs": {"s3": {"addressing_style": "path"}},
            "key": "hunter2",
        },
        endpoint_url="http://ceph:7480",
    )
    assert redacted(f"eu-west-1 path {CANARY} hunter2") == "eu-west-1 path *** ***"
    assert storage.public().arguments() == [
        *("--endpoint-url", "http://ceph:7480", "--storage-option", "anon=false"),
        *("--storage-option", 'config_kwargs={"s3": {"addressing_style": "path"}}'),
    ]


@pytest.mark.parametrize("given", [CANARY, f"={CANARY}", "c2VjcmV0/Y2FuYXJ5==", "x9!"])
def test_a_storage_option_whose_key_was_forgotten_is_not_shown(given):
    answer = run_ckptctl("pick", "s3://bucket/run", "--storage-option", given)
    assert answer.returncode == 2
    assert "--storage-option is KEY=VALUE" in answer.stderr
    assert given not in answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("pick", "s3://bucket/run", "--storage-optoin", f"secret={CANARY}"), {}),
        (("pikc", "s3://bucket/run", "--storage-optoin", CANARY, "--debug"), {}),
        (("explain", CANARY), {"CKPTCTL_STORAGE_OPTOIN": CANARY}),
    ],
)
def test_the_value_of_an_option_that_does_not_exist_is_not_shown(words, env):
    answer = run_ckptctl(*words, env=env)
    assert answer.returncode == 2
    assert CANARY not in answer.stdout + answer.stderr


def test_the_value_of_an_option_of_another_command_is_shown():
    node = "Node-A17"
    answer = run_ckptctl("explain", node, env={"CKPTCTL_NODES": node})
    assert node in answer.stderr


def test_a_short_secret_hides_no_part_of_a_word_or_number_and_no_root():
    StorageOptions(storage_options={"key": "1200", "secret": "train"})
    assert redacted("step 12003 of training") == "step 12003 of training"
    redaction.keep("s3://runs/train/a")
    assert redacted("s3://runs/train/a") == "s3://runs/train/a"


def test_a_next_command_without_secrets_is_unchanged():
    words = ("ckptctl", "pick", "s3://b/run", "--endpoint-url", "http://ceph:7480")
    options = ("--storage-option", "anon=true", "--storage-option", 'client_kwargs={"a": true}')
    launcher = ("--launcher", "srun --jobid 4711 --overlap --ntasks-per-node=1")
    job = ("--", "torchrun", "--nproc-per-node", "8", "train.py", "{root}")
    whole = (*words, *options[:2], *launcher, *job)
    assert shell_command(whole) == shlex.join(whole)


def test_a_shell_reads_a_next_command_with_the_secret_in_its_variable():
    command = shell_command(("printf", "%s\n", "--storage-option", f"secret={CANARY}", "--last"))
    assert command == "printf '%s\n' --storage-option secret=\"$CKPTCTL_STORAGE_SECRET\" --last"
    ran = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "CKPTCTL_STORAGE_SECRET": CANARY},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.splitlines() == ["--storage-option", f"secret={CANARY}", "--last"]


def test_exceptions_keys_warnings_and_logging_hold_no_secret():
    StorageOptions(storage_options={"sas_token": CANARY})
    Requirements(key=b"0123456789abcdefKEY")
    assert str(StorageUnavailable(f"no answer: {CANARY}")) == "no answer: ***"
    stream = StringIO()
    with redirect_stderr(cast("StringIO", RedactedStream(stream))):
        warnings.showwarning(UserWarning(f"odd {CANARY}"), UserWarning, "x.py", 1)
        logging.lastResort.handle(
            logging.makeLogRecord({"msg": f"key 0123456789abcdefKEY {CANARY}"})
        )
    assert not leaks(stream.getvalue())
    assert "key *** ***" in stream.getvalue()


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        ("s3://user:pass@bucket/run", True),
        ("https://user:pass@host/run", True),
        ("https://host/run?X-Amz-Signature=ab", True),
        ("az://container/run?sv=2022&sig=ab", True),
        ("s3://bucket/run", False),
        ("s3://bucket/what?x=1/run", False),
        ("abfss://container@account.dfs.core.windows.net/run", False),
        ("/scratch/what?x=1", False),
    ],
)
def test_a_root_whose_address_holds_a_secret_is_refused(address, is_refused):
    if not is_refused:
        check_address(address)
        return
    with pytest.raises(UsageError, match="is not supported") as refused:
        check_address(address)
    assert "pass" not in str(refused.value).partition(": an address")[0]
    assert "ab" not in str(refused.value).partition("?")[2].partition(":")[0]


class Redirecting(HTTPServer):
    """A storage that redirects each request to a signed address, and denies that one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Redirects)


class _Redirects(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        signed = f"/signed?X-Amz-Credential=AKCREDENTIAL&X-Amz-Signature={quote(CANARY, safe='')}"
        self.send_response(403 if self.path.startswith("/signed") else 302)
        self.send_header("Location", signed)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests clean."""


def test_an_answer_with_a_signed_address_shows_no_signature(tmp_path):
    pytest.importorskip("aiohttp")
    with Redirecting() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/run"
        ran = run_ckptctl("scan", url, "--debug", "--json", "--report", tmp_path / "report.json")
        server.shutdown()
        thread.join()
    assert ran.returncode
    assert "/signed?X-Amz-Credential=***&X-Amz-Signature=***" in ran.stderr
    assert not leaks(ran.stdout, ran.stderr, folder=tmp_path)
    assert "AKCREDENTIAL" not in ran.stdout + ran.stderr


RECORDING = """#!{python}
import os, subprocess, sys
with open({file!r}, "a") as file:
    file.write("\\0".join(sys.argv) + "\\n")
env = dict(os.environ) if {passes_environment} else {{"PATH": os.environ["PATH"]}}
sys.exit(subprocess.run(sys.argv[1:], env=env).returncode)
"""


def recording_launcher(folder: Path, *, environment: bool) -> tuple[Path, Path]:
    """A launcher that records its arguments, and passes on what it is told to."""
    script, file = folder / "launch", folder / "arguments"
    script.write_text(
        RECORDING.format(
            python=sys.executable,
            file=str(file),
            passes_environment=environment,
        )
    )
    script.chmod(0o755)
    return script, file


@pytest.mark.parametrize("environment", [True, False])
def test_a_launcher_gets_secrets_by_environment_and_never_as_arguments(
    places, tmp_path, environment
):
    script, file = recording_launcher(tmp_path, environment=environment)
    options = ("--storage-option", f"secret={CANARY}", "--storage-option", "anon=false")
    ran = run_ckptctl(
        *("preflight", places["root"], "--launcher", str(script), *options),
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    recorded = file.read_text()
    assert not leaks(recorded, ran.stdout, ran.stderr)
    assert "secret=" not in recorded
    assert "anon=false" in recorded
    assert ran.returncode == 0, ran.stderr


PAGE = """# RB-99: Print a secret

| input | default | meaning |
|---|---|---|
| `TEXT` | | what is printed |

## print

```sh
echo "given $TEXT"; echo "key $AWS_SECRET_ACCESS_KEY"; tr '\\0' ' ' < /proc/$$/cmdline
```

| exit code | next | because |
|---|---|---|
| 0 | done | it is printed |
"""


def test_a_record_of_a_runbook_holds_no_secret_and_is_its_owners_alone(places, tmp_path):
    os.umask(0o022)
    transcript = tmp_path / "transcript"
    ran = run_ckptctl(
        *("runbook", "run", "rb-7", places["root"], "--yes", "--transcript", transcript),
        *("--set", f"LOG={places['log']}", "--set", f"RESUME=true --token {CANARY}"),
        env={"AWS_SECRET_ACCESS_KEY": CANARY},
    )
    record = Path(places["root"], ".ckptctl", "runbooks")
    files = [each for each in record.rglob("*") if each.is_file()]
    assert len(files) > 3
    assert not leaks(ran.stdout, ran.stderr, folder=tmp_path)
    written = [*files, *transcript.iterdir()]
    assert {oct(each.stat().st_mode & 0o777) for each in written} == {"0o600"}
    (opened,) = record.rglob("000001.json")
    assert json.loads(opened.read_bytes())["inputs"]["RESUME"] == "true --token ***"


def test_a_run_writes_its_command_nowhere(places, tmp_path):
    sent = tmp_path / "sent"
    notify = tmp_path / "notify"
    notify.write_text(f"#!/bin/sh\ncat >> {sent}\n")
    notify.chmod(0o755)
    job = ("sh", "-c", "echo RuntimeError: failed; exit 1", "sh", "--token", CANARY)
    ran = run_ckptctl(
        *("run", "--root", places["root"], "--max-restarts", 1, "--backoff", "0s"),
        *("--log-dir", tmp_path / "logs", "--notify", notify, "--", *job),
        env={"XDG_STATE_HOME": str(tmp_path / "state"), "AWS_SECRET_ACCESS_KEY": CANARY},
    )
    assert ran.returncode == 93
    assert sent.read_text().count("ckptctl.") >= 2
    assert not leaks(ran.stdout, ran.stderr, folder=tmp_path)
    (copy,) = (tmp_path / "state").rglob("*.json")
    assert oct(copy.stat().st_mode & 0o777) == "0o600"
