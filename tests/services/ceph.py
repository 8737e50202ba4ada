"""A real S3 server on loopback: Ceph's object gateway over a cluster of one disk in memory.

    python tests/services/ceph.py install       Debian's packages; about a minute, needs root
    python tests/services/ceph.py start FOLDER   prints the variables to export
    python tests/services/ceph.py stop FOLDER

`FOLDER` is emptied by `start` and holds the cluster's state, logs and process
numbers. Everything listens on loopback only, without authentication between
the daemons; the cluster is gone with its processes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from services.processes import end_by_pid_file, free_port, wait_until

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ACCESS_KEY = "ckptctl-test"
SECRET_KEY = "ckptctl-test-secret"

_CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{mon_port}]
mon initial members = a
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
osd crush update on start = false
osd class update on start = false
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/log/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
[client.rgw]
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
"""


@dataclass(frozen=True)
class Gateway:
    """An object gateway that answers, and the keys of its one user."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY


def why_not() -> str | None:
    """Why the cluster cannot run on this machine, or None where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return (
            f"{', '.join(missing)} not installed; as root on Debian: "
            "python tests/services/ceph.py install"
        )
    return None if os.geteuid() == 0 else "Ceph's daemons are started as root here"


def start(folder: Path, tries: int = 3) -> Gateway:
    """Bring up monitor, one disk in memory and the gateway; 10 to 20 s.

    No request needs a manager, which would take as much processor time as all the rest. A monitor
    that is young now and then refuses a command, so it is tried again. Raises
    `subprocess.CalledProcessError` or `TimeoutError` where a part of it does not come up in the
    last of the `tries`; `FOLDER/log` says why.
    """
    for _ in range(tries - 1):
        with suppress(subprocess.CalledProcessError, TimeoutError):
            return _start(folder)
    return _start(folder)


def _start(folder: Path) -> Gateway:
    stop(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("run", "log", "mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    fsid, port, mon_port = str(uuid.uuid4()), free_port(), free_port()
    conf = str(folder / "ceph.conf")
    Path(conf).write_text(
        _CONFIGURATION.format(folder=folder, fsid=fsid, port=port, mon_port=mon_port)
    )
    try:
        _start_cluster(conf, folder, fsid, mon_port)
        _run("radosgw", "-c", conf, "-n", "client.rgw")
        wait_until(lambda: _serves(port), what="the object gateway")
        _run(
            *("radosgw-admin", "-c", conf, "-n", "client.rgw", "user", "create"),
            *("--uid", "test", "--display-name", "test"),
            *("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY),
        )
    except BaseException:
        stop(folder)
        raise
    return Gateway(f"http://127.0.0.1:{port}")


def stop(folder: Path) -> None:
    """End every daemon that was started in `folder`, the gateway first."""
    files = sorted(folder.glob("run/*.pid"), key=lambda file: "rgw" not in file.name)
    for file in files:
        end_by_pid_file(file, of=str(folder))


def install() -> None:
    """Install what is missing from Debian's packages."""
    _run("apt-get", "update", "-qq")
    _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES)


def _start_cluster(conf: str, folder: Path, fsid: str, mon_port: int) -> None:
    monmap = str(folder / "monmap")
    at = f"[v1:127.0.0.1:{mon_port}]"
    _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", at, monmap)
    _run("ceph-mon", "-c", conf, "-i", "a", "--mkfs", "--monmap", monmap)
    _run("ceph-mon", "-c", conf, "-i", "a")
    disk = str(uuid.uuid4())
    number = _run("ceph", "-c", conf, "osd", "new", disk).strip()
    _run("ceph-osd", "-c", conf, "-i", number, "--mkfs", "--osd-uuid", disk)
    _run("ceph-osd", "-c", conf, "-i", number)
    _run(
        *("ceph", "-c", conf, "osd", "crush", "add", f"osd.{number}", "1.0"),
        *("root=default", "host=localhost"),
    )


def _run(*command: str) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
    return done.stdout


def _serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(arguments: Sequence[str]) -> int:
    """Run one of the three verbs; 2 where this machine lacks something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install")
    for verb in ("start", "stop"):
        verbs.add_parser(verb).add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "install":
        install()
    elif chosen.verb == "stop":
        stop(chosen.folder.resolve())
    elif reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    else:
        gateway = start(chosen.folder.resolve())
        print(f"export AWS_ENDPOINT_URL={gateway.endpoint}")
        print(f"export AWS_ACCESS_KEY_ID={gateway.access_key}")
        print(f"export AWS_SECRET_ACCESS_KEY={gateway.secret_key}")
        print("export AWS_DEFAULT_REGION=us-east-1")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
