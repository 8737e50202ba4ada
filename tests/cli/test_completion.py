"""Completion, as the shells themselves do it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import clean_environment, forked_python, run_ckptctl

SHELLS = Path(__file__).parents[2] / "ckptctl" / "cli" / "shells"

# Each prints the candidates of the line in $LINE, one a line.
ASK = {
    "bash": """
source "$SCRIPT"
COMP_LINE=$LINE COMP_POINT=${#LINE}
_ckptctl
prefix=${LINE##*[@:= ]}
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "fish": 'source "$SCRIPT"; complete --do-complete "$LINE" | string replace -r "\\t.*" ""; true',
    "zsh": """
autoload -U compinit && compinit -u -d "$HOME/zcompdump"
source "$SCRIPT"
_describe() { shift 2; print -rl -- ${${(P)1}%%:*} }
_files() { }
words=("${(z)LINE}")
[[ $LINE == *" " ]] && words+=("")
CURRENT=${#words}
_ckptctl
""",
}


@pytest.fixture(scope="module")
def root(framework_roots, tmp_path_factory):
    folder = tmp_path_factory.mktemp("completed")
    return shutil.copytree(framework_roots / "kempnerforge" / "checkpoints", folder / "run")


@pytest.fixture(params=sorted(ASK))
def complete(request, tmp_path):
    """A function that gives the candidates of a line."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"{request.param} is not installed")
    program = tmp_path / "bin" / "ckptctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(forked_python())} -m ckptctl "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(run_ckptctl("--show-completion", request.param).stdout)

    def candidates(line: str) -> list[str]:
        path = f"{program.parent}:/usr/local/bin:/usr/bin:/bin"
        env = clean_environment(PATH=path, LINE=line, SCRIPT=str(script), HOME=str(tmp_path))
        done = subprocess.run(
            [shell, "-c", ASK[request.param]], env=env, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        found = done.stdout.split()
        # bash gets what stands behind the last break of a word.
        return [each.rpartition("@")[2] for each in found]

    return candidates


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckptctl ver", ["verify"]),
        ("ckptctl verify --lev", ["--level"]),
        ("ckptctl verify --level ", ["listing", "structure", "content"]),
        ("ckptctl --json verify run --level c", ["content"]),
        ("ckptctl explain shard.trun", ["shard.truncated"]),
        ("ckptctl runbook r", ["run"]),
        ("ckptctl runbook run rb-", ["rb-7"]),
        ("ckptctl verify {root}@", ["auto", "latest", "30", "20", "10"]),
        ("ckptctl verify {root}@2", ["20"]),
        ("ckptctl run --root x -- ver", []),
    ],
)
def test_a_line_is_completed(complete, root, line, expected):
    assert complete(line.format(root=root)) == expected


def test_nothing_but_a_local_folder_is_asked():
    env = {"_CKPTCTL_COMPLETE": "1"}
    done = run_ckptctl("verify", "s3://no-such-bucket/run@", env=env)
    assert [each.partition("\t")[0] for each in done.stdout.splitlines()] == [
        "s3://no-such-bucket/run@auto",
        "s3://no-such-bucket/run@latest",
    ]
    done = run_ckptctl("verify", "no/such/root@3", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_shell_is_a_mistake():
    done = run_ckptctl("--show-completion", "tcsh")
    assert done.returncode == 2
    assert "bash, fish, zsh" in done.stderr
