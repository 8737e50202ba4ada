"""Nodes are excluded on certain evidence only, and the world shrinks with them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from command_line import run_ckptctl
from supervisor.supervised_root import states

import ckptctl
from ckptctl.distributed.launcher import expand, is_node
from ckptctl.errors import UsageError
from ckptctl.supervisor.nodes import NodeOptions

XID = "gpu-002 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
NODES = ("gpu-001", "gpu-002", "gpu-003", "gpu-004")


@pytest.fixture
def drain(tmp_path: Path) -> str:
    """A command that records its arguments, as `scontrol` would get them."""
    program = tmp_path / "drain.py"
    program.write_text(
        f"import json, sys\nopen({str(tmp_path / 'drained')!r}, 'a')"
        ".write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    python = shlex.quote(sys.executable)
    return f"{python} {program} update NodeName={{node}} State=DRAIN Reason={{cause}}"


def drained(tmp_path: Path) -> list[list[str]]:
    path = tmp_path / "drained"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(
    root: Path, lines: str, *, said: list[str] | None = None, **about: object
) -> ckptctl.Supervised:
    """A job that adds lines to its log, says what it was told, and fails once."""
    log = root.parent / "train.log"
    (root.parent / "lines").write_text(lines)
    job = (
        f'cat "{root.parent}/lines" >> "{log}"; echo "$CKPTCTL_EXCLUDED_NODES $CKPTCTL_WORLD_SIZE '
        f'$*" >> "{root.parent}/told"; [ "$CKPTCTL_RESTART_COUNT" -ge 1 ]'
    )
    return ckptctl.keep_running(
        ["sh", "-c", job, "job", "--exclude={excluded}", "-n{world_size}", "-N{nodes}"],
        str(root),
        backoff_s=0,
        logs=[str(log)],
        tell=(said if said is not None else []).append,
        nodes=NodeOptions(**{"nodes": NODES, **about}),
    )


def told(tmp_path: Path) -> list[str]:
    return [line.strip() for line in (tmp_path / "told").read_text().splitlines()]


def test_a_node_with_a_certain_fault_is_excluded_by_command_and_launcher(
    root: Path, tmp_path: Path, drain: str
):
    found = run(root, XID, exclude_command=drain)
    assert drained(tmp_path) == [["update", "NodeName=gpu-002", "State=DRAIN", "Reason=infra-node"]]
    assert [line.split("-n")[0].strip() for line in told(tmp_path)] == [
        "",
        "gpu-002  --exclude=gpu-002",
    ]
    assert found.attempts[0].nodes == ("gpu-002",)
    (entry,) = states(root)[-1]["excluded"]
    assert (entry["node"], entry["cause"], entry["attempt"]) == ("gpu-002", "infra-node", 1)


@pytest.mark.parametrize(
    "line",
    [
        XID.replace("gpu-002", "gpu-999"),
        XID.replace("gpu-002", "-oProxyCommand=x"),
        XID.replace("gpu-002", "gpu-[001-004]"),
    ],
)
def test_a_planted_line_drains_no_node_that_is_not_of_the_job(
    root: Path, tmp_path: Path, drain: str, line: str
):
    run(root, line, exclude_command=drain)
    assert drained(tmp_path) == []
    assert states(root)[-1]["excluded"] == []


def test_no_more_nodes_are_excluded_than_was_allowed(root: Path, tmp_path: Path, drain: str):
    said: list[str] = []
    run(root, XID + XID.replace("002", "003"), exclude_command=drain, said=said)
    assert len(drained(tmp_path)) == 1
    assert any("--max-excluded" in line for line in said)


def test_nothing_of_the_command_is_read_by_a_shell(root: Path, tmp_path: Path):
    run(root, XID, exclude_command=f"touch '{tmp_path}/$(id) {{node}};x'")
    assert (tmp_path / "$(id) gpu-002;x").exists()


def test_a_command_that_fails_is_a_warning_and_the_job_goes_on(root: Path):
    said: list[str] = []
    found = run(root, XID, exclude_command="false {node}", said=said)
    assert found.exit_code == 0
    assert any("false gpu-002 ended with 1" in line for line in said)


def test_the_world_shrinks_with_the_nodes_and_never_below_the_least(
    root: Path, tmp_path: Path, drain: str
):
    found = run(root, XID, exclude_command=drain, world_sizes=(16, 12, 8))
    assert found.exit_code == 0
    assert [attempt.world_size for attempt in found.attempts] == [16, 12]
    assert told(tmp_path)[-1].endswith("-n12 -N3")
    stopped = run(root, "", exclude_command=drain, world_sizes=(16, 12, 8), min_world_size=14)
    assert (stopped.exit_code, stopped.attempts) == (94, ())


def test_too_few_nodes_after_a_failure_is_94_and_is_not_retried(
    root: Path, tmp_path: Path, drain: str
):
    found = run(root, XID, exclude_command=drain, world_sizes=(16, 12), min_world_size=16)
    assert (found.exit_code, len(found.attempts)) == (94, 1)
    assert "waiting for capacity" in found.message


def test_a_node_of_three_short_attempts_in_a_row_is_suspect_and_stays(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    scontrol.chmod(0o755)
    drain = f"{scontrol} update NodeName={{node}} State=DRAIN Reason={{cause}}"
    said: list[str] = []
    for nodes in ("a[1-3]", "a[3-5]", "a[3,6-7]"):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        ckptctl.keep_running(
            ["sh", "-c", f"[ -e {tmp_path}/no ] || exit 1"],
            str(root),
            backoff_s=0,
            max_restarts=0 if nodes.startswith("x") else 9,
            no_restart=() if nodes == "a[3,6-7]" else (1,),
            on_attempt=lambda attempt: (tmp_path / "no").touch() if attempt.number == 3 else None,
            tell=said.append,
            nodes=NodeOptions(exclude_command=drain),
        )
    assert not (tmp_path / "ran").exists()
    (line,) = [line for line in said if line.startswith("a3 is named (suspect)")]
    assert "nothing speaks against its hardware" in line
    assert line.endswith(f"{scontrol} update NodeName=a3 State=DRAIN Reason=suspect")


def test_the_same_nodes_three_times_make_none_of_them_suspect(
    root: Path, tmp_path: Path, drain: str
):
    ckptctl.keep_running(
        ["false"],
        str(root),
        backoff_s=0,
        nodes=NodeOptions(nodes=NODES, exclude_command=drain),
    )
    assert drained(tmp_path) == []


def test_lists_of_nodes_are_expanded_as_slurm_does():
    assert expand("gpu-[007-009,012],login1") == (
        "gpu-007",
        "gpu-008",
        "gpu-009",
        "gpu-012",
        "login1",
    )
    assert expand("r[1-2]n[01-02]") == ("r1n01", "r1n02", "r2n01", "r2n02")
    too_many = f"a[{','.join(['0-65535'] * 20_000)}]"  # more than memory holds
    for bad in ("a[1-", "a[x]", "a[1-999999999]", "-x", "a[0-99999]b[0-99999]", too_many):
        assert expand(bad) == (), bad


@pytest.mark.parametrize("name", ["", "-x", "a,b", "a[1]", "a=b", "a b", "a" * 300, "a\n"])
def test_what_is_no_name_of_a_node_is_refused(name: str):
    assert not is_node(name)
    with pytest.raises(UsageError):
        NodeOptions(nodes=(name,))


def test_a_command_with_an_open_quote_is_refused_before_the_first_attempt():
    with pytest.raises(UsageError, match="--exclude-command"):
        NodeOptions(exclude_command="drain '{node}")


def test_a_command_without_the_node_is_refused_on_the_command_line(root: Path):
    done = run_ckptctl("run", "--root", root, "--exclude-command", "drain", "--", "true")
    assert done.returncode == 2
    assert "does not say where the name of the node belongs" in done.stderr
    sizes = run_ckptctl("run", "--root", root, "--world-sizes", "8,x", "--", "true")
    assert sizes.returncode == 2


def test_the_command_line_takes_nodes_and_sizes(root: Path, tmp_path: Path):
    done = run_ckptctl(
        *("run", "--root", root, "--nodes", "gpu-1,gpu-2", "--world-sizes", "8,4", "--"),
        *("sh", "-c", f"echo {{world_size}} {{nodes}} > {tmp_path}/size"),
    )
    assert done.returncode == 0
    assert (tmp_path / "size").read_text() == "8 2\n"


def test_the_launcher_gets_the_nodes_that_are_left_in_a_host_file(root: Path, tmp_path: Path):
    hosts = tmp_path / "hosts"
    job = f'cat {hosts} >> {tmp_path}/had; echo - >> {tmp_path}/had; echo "{XID.strip()}"; exit 1'
    ckptctl.keep_running(
        ["sh", "-c", f"{job}"],
        str(root),
        backoff_s=0,
        max_restarts=1,
        log_dir=str(tmp_path / "logs"),
        nodes=NodeOptions(nodes=NODES, hosts_file=str(hosts), world_sizes=(16, 8)),
    )
    assert (tmp_path / "had").read_text().split() == [*NODES, "-", "gpu-001", "gpu-003", "-"]
    unwritable = NodeOptions(nodes=NODES, hosts_file=str(tmp_path / "no" / "hosts"))
    with pytest.raises(UsageError, match="--hosts-file"):
        ckptctl.keep_running(["true"], str(root), nodes=unwritable)
