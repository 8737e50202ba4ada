"""Following the `next:` that a command prints, against the tree in which it was printed.

`run_and_follow` passes each answer to `follow`. What comes next must be another command than
the one that was run, must be understood, must not offer `accept` for a damaged step, and
must show something where it is `show`; what follows from it never leads back. A command
that changes something runs on a copy. Commands of one form are followed once in a process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from command_line import clean_environment, run_ckptctl

READS = {
    *("scan", "verify", "pick", "show", "diff", "explain", "loss", "classify", "cost"),
    *("doctor", "preflight", "prune"),
}
CHANGES = {"seal", "reject", "accept", "confirm", "pin", "reshard", "convert"}
ENDLESS = {"run"}
"""Starts a job of the caller's: it is read here, and not run."""

_CHANGING = {"--apply", "--create", "--probe-storage", "--notify", "--replace"}
_SHOWN = {"--json", "--quiet", "-q", "--debug"}
_PLACEHOLDER = re.compile(
    r"(?:\w+=)?(?:ROOT|STEP|SRC|DST|LOG|FILE|CMD|NAME|CODE|DIR|TARGET|TIME|NODES|RATE)(?:@\w+)?"
)
_LIMIT_BYTES = 256 << 20
_MAX_LINKS = 8
_USABLE = (0, 3, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 31, 32, 35, 75, 77, 93)
"""How a command may end that was understood and could do its work."""

EXIT_BUG = 1

seen: set[tuple[str, ...]] = set()


def next_command(output: str) -> str | None:
    """The command that an answer ends with, as text or in a document; None where there is none."""
    lines = [line for line in output.splitlines() if line.startswith("next:")]
    if lines:
        return lines[-1].removeprefix("next:").strip()
    try:
        document = json.loads(output)
    except ValueError:
        return None
    found = document.get("next_command") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def run_and_follow(
    *args: object, env: dict[str, str] | None = None, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Run `ckptctl` as `run_ckptctl` does, and the command that its `next:` names.

    Both run in the folder `cwd`, or in an empty one that is removed.
    """
    with tempfile.TemporaryDirectory() as empty:  # a command may write beside its arguments
        cwd = kwargs.pop("cwd", None) or empty
        done = run_ckptctl(*args, env=env, cwd=cwd, **kwargs)
        said = (done.stdout or "") + (done.stderr or "")
        variables = clean_environment(**(env or {}))
        follow([*map(str, args)], done.returncode, said, cwd=Path(str(cwd)), env=variables)
    return done


def follow(
    words: Sequence[str], exit_code: int, output: str, *, cwd: Path, env: Mapping[str, str]
) -> None:
    """Run what an answer says comes next, and what comes after that."""
    if exit_code == EXIT_BUG:
        return  # the same command again, with --debug
    chain = [_form(words)]
    for _ in range(_MAX_LINKS):
        command = next_command(output)
        if command is None or not command.startswith("ckptctl ") or "$CKPTCTL_" in command:
            return
        words = _words(command)
        if any(_PLACEHOLDER.fullmatch(word) for word in words):
            return  # the caller gave no argument to repeat
        form = _form(words)
        where = f"`ckptctl {shlex.join(chain[-1])}` ended with {exit_code} and"
        assert form != chain[-1], f"{where} names itself as the next command"
        assert form not in chain, f"{where} leads back to `{command}`: {chain}"
        key = (chain[-1][0] if chain[-1] else "", str(exit_code), *_shape(words))
        if key in seen:
            return
        seen.add(key)
        chain.append(form)
        done = _ran(words, cwd, env)
        if done is None:
            return
        said = done.stdout + done.stderr
        # A mistake that is put right with an example may show the next one.
        mended = done.returncode == 2 and next_command(said) is not None
        assert done.returncode in _USABLE or mended, f"{where} leads to `{command}`:\n{said}"
        if words[0] == "show":
            _check_shows(words, cwd, env, where)
        if words[0] == "accept":
            _check_acceptable(words, cwd, env, where)
        if words[0] not in READS or _changes(words):
            return
        exit_code, output = done.returncode, said


def _words(command: str) -> list[str]:
    """The arguments of a command, as a shell gives them."""
    if "$'" not in command:
        return shlex.split(command)[1:]
    script = command.replace("ckptctl", r"printf %s\\0", 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def _form(words: Sequence[str]) -> tuple[str, ...]:
    """A command line without what only changes how its answer looks."""
    if words and words[0].startswith("-"):
        return tuple(words)  # options that stand in the wrong place
    return tuple(word for word in map(str, words) if word not in _SHOWN)


def _shape(words: Sequence[str]) -> Iterator[str]:
    yield words[0]
    for before, word in pairwise(words):
        if word.startswith("-"):
            yield word.partition("=")[0]
        elif before in ("--level", "explain", "run") or words[0] in ("runbook", "explain"):
            yield word if "/" not in word else "PATH"


def _changes(words: Sequence[str]) -> bool:
    own = words[: words.index("--")] if "--" in words else words
    if own[0] in READS:
        return any(word in _CHANGING for word in own)
    return own[0] in CHANGES


def _ran(
    words: Sequence[str], cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str] | None:
    """A command that was run; None for one that is not run here."""
    if words[0] in ENDLESS:
        return None
    if words[0] == "runbook":
        again = {"--yes", "--new", "--continue", "--dry-run"}
        leads = [word for word in words if word not in again]
        return _run([*leads, *(["--dry-run"] if leads[1:2] == ["run"] else [])], cwd, env)
    if not _changes(words):
        return _run(words, cwd, env)
    with tempfile.TemporaryDirectory() as aside:
        copied = _on_copies(words, cwd, Path(aside), env)
        return None if copied is None else _run(copied, cwd, env)


def _run(
    words: Sequence[str], cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return run_ckptctl(*words, env=dict(env), cwd=cwd)


def _on_copies(
    words: Sequence[str], cwd: Path, aside: Path, env: Mapping[str, str]
) -> list[str] | None:
    """The words with every path in a copy of its folder or bucket; None for what is too large."""
    if any(word.startswith("s3://") for word in words):
        return [_in_copied_bucket(word, env) for word in words]
    if any("://" in word for word in words):
        return None
    copies: dict[Path, Path] = {}
    changed = []
    for word in words:
        path = Path(os.path.abspath(cwd / word)) if "/" in word or (cwd / word).exists() else None
        if path is None or word.startswith("-"):
            changed.append(word)
            continue
        folder = path.parent
        if folder not in copies:
            if not folder.is_dir() or _size(folder) > _LIMIT_BYTES:
                return None
            copies[folder] = Path(shutil.copytree(folder, aside / str(len(copies)), symlinks=True))
        changed.append(str(copies[folder] / path.name))
    return changed


def _in_copied_bucket(word: str, env: Mapping[str, str]) -> str:
    """The URL of the same object in a copy of what lies beside it; other words as they are."""
    if not word.startswith("s3://"):
        return word
    import botocore.session

    bucket, _, path = word.removeprefix("s3://").partition("/")
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_DEFAULT_REGION"],
    )
    copy = f"copy-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=copy)
    prefix = path.partition("/")[0].partition("@")[0]
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for each in page.get("Contents", ()):
            source = {"Bucket": bucket, "Key": each["Key"]}
            client.copy_object(Bucket=copy, Key=each["Key"], CopySource=source)
    return f"s3://{copy}/{path}"


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _check_shows(words: Sequence[str], cwd: Path, env: Mapping[str, str], where: str) -> None:
    document = json.loads(_run([*words, "--json"], cwd, env).stdout)
    assert document.get("tensors") or document.get("shards"), f"{where} leads to an empty `show`"


def _check_acceptable(words: Sequence[str], cwd: Path, env: Mapping[str, str], where: str) -> None:
    document = json.loads(_run(["verify", words[1], "--json"], cwd, env).stdout)
    assert not document["report"]["damaged"], f"{where} offers to accept a damaged step"
