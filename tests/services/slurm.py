"""A real Slurm on one machine: a controller and nodes, each with a network of its own.

    python tests/services/slurm.py install        Debian's packages; ten seconds, needs root
    python tests/services/slurm.py start FOLDER   stays in the foreground; prints how to use it
    python tests/services/slurm.py check          0 where it can run here, else 2 and the reason

Everything runs in namespaces below one process, the head: network, mounts, host names and process
numbers. When the head is killed, the kernel ends all of it, and the machine is as it was before.
Each node is a name (`n1`, `n2`, ...) with an address on a bridge, processes that no other node
sees, and a `/dev/shm`; files are shared. So ports do not collide, and a node that is powered off or
cut from the network falls silent as a real one does.

Partitions: `low` (the default: a job of `high` preempts its jobs, which are requeued after
`GraceTime`) and `high`. Times that Slurm has in minutes are shortened: a requeued job waits
`cred_expire`, a node that does not answer is down after `SlurmdTimeout`. A time limit is a whole
minute, and the controller compares it twice a minute.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from services.processes import wait_until

PACKAGES = ("slurm-wlm", "munge", "iproute2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "nsenter")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GRACE_S = 20
"""From SIGTERM to the end of a job that is preempted."""

_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=head(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=15
SlurmctldTimeout=20
MinJobAge=3600
KillWait=30
JobRequeue=1
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=1-0 State=UP
PartitionName=low Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high PriorityTier=10 PreemptMode=OFF
"""
_NODE = "NodeName={name} NodeAddr={address} CPUs=8 CoresPerSocket=8 RealMemory=8000 Gres=gpu:8"

_HEAD = """\
set -e
echo head > /proc/sys/kernel/hostname
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs tmpfs /run && mkdir /run/netns
ip link set lo up
ip link add br0 type bridge
ip addr add 10.77.0.1/24 dev br0
ip link set br0 up
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" \
    --pid-file="$1/munged.pid" --seed-file="$1/munge.seed" --log-file="$1/log/munged.log" &
until [[ -S $1/munge.socket ]]; do sleep 0.05; done
slurmctld -D -f "$1/slurm.conf" &
wait
"""
"""The shell is process 1 of the head: it reaps orphans, and all else ends with it."""

_NETWORK = """\
set -e
ip netns add "$1"
ip link add "$1" type veth peer name eth0 netns "$1"
ip link set "$1" master br0
ip -n "$1" addr add "$2/24" dev eth0
ip -n "$1" link set eth0 up
ip -n "$1" link set lo up
"""
_POWER_ON = """\
ip link set "$1" up
nsenter --net="/run/netns/$1" unshare --mount --uts --pid --fork --kill-child --mount-proc \
    bash -c 'echo "$1" > /proc/sys/kernel/hostname
    mount --bind "$3" /mnt
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mkdir -p "$3" && mount --bind /mnt "$3"
    slurmd -D -f "$2/slurm.conf" -N "$1" & wait $!' node "$1" "$2" "$3" \
    < /dev/null >> "$2/log/$1.out" 2>&1 &
echo $! > "$2/$1.pid"
"""
# First the network, then the processes: a node without power closes no connection.
_POWER_OFF = 'ip link set "$1" down; kill -KILL "$(< "$2/$1.pid")"'


def why_not() -> str | None:
    """Why a Slurm cannot run on this machine, or None where it can."""
    if os.geteuid() != 0:
        return "the namespaces of Slurm's nodes need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]
    if missing:
        return (
            f"{', '.join(missing)} not installed; as root on Debian: "
            "python tests/services/slurm.py install"
        )
    probe = "ip link add probe type veth peer name other && mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "bash", "-c", probe],
        capture_output=True,
        text=True,
    )
    return f"no namespaces: {tried.stderr.strip()[:200]}" if tried.returncode else None


def install() -> None:
    """Install what is missing from Debian's packages, and start nothing."""
    # Without systemd and in run level 1, the packages' own scripts start no daemon.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (
        ("update", "-qq"),
        ("install", "-y", "-qq", "--no-install-recommends", *PACKAGES),
    ):
        subprocess.run(["apt-get", *words], env=environment, check=True, stdin=subprocess.DEVNULL)


class Slurm:
    """A cluster that runs until `stop`; its state and logs lie in `folder`, which it empties.

    Raises `TimeoutError` where the nodes do not become idle; `FOLDER/log` says why.
    """

    def __init__(self, folder: Path, n_nodes: int = 4) -> None:
        self.folder = folder
        self.nodes = tuple(f"n{number}" for number in range(1, n_nodes + 1))
        addresses = {name: f"10.77.0.{10 + at}" for at, name in enumerate(self.nodes, 1)}
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("log", "state", "spool"):
            (folder / name).mkdir(parents=True, mode=0o755)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        nodes = [_NODE.format(name=name, address=at) for name, at in addresses.items()]
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(folder=folder, nodes="\n".join(nodes), grace_s=GRACE_S)
        )
        for number in range(8):
            (folder / f"gpu{number}").touch()  # what it counts as devices; nothing opens them
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        hosts = {"localhost": "127.0.0.1", "head": "10.77.0.1", **addresses}
        (folder / "hosts").write_text("".join(f"{at} {name}\n" for name, at in hosts.items()))
        with (folder / "log" / "head.out").open("a") as output:
            self._head = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "unshare"),
                    *("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"),
                    *("--mount-proc", "--propagation", "private"),
                    *("bash", "-c", _HEAD, "head", str(folder)),
                ],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(self._answers, what="the controller of Slurm", limit_s=60)
            for name, address in addresses.items():
                self._on_head("bash", "-c", _NETWORK, "network", name, address)
                self.power_on(name)
            wait_until(self._is_idle, what="idle nodes of Slurm", limit_s=60)
        except BaseException:
            self.stop()
            raise

    def environment(self, **variables: str) -> dict[str, str]:
        """The variables with which its commands run: none of another job."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "PYTEST_"))
        }
        path = f"{kept.get('PATH', '')}:{SYSTEM_PATH}"
        return {**kept, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf"), **variables}

    def run(
        self,
        *command: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head."""
        return subprocess.run(
            self.on_head(*command, cwd=cwd),
            env=self.environment(**(environment or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def on_head(self, *command: object, cwd: Path | None = None) -> list[str]:
        """The words that run a command on the head; give it `environment()`."""
        (init,) = self._children()
        entered = ["nsenter", "--target", init, "--net", "--mount", "--uts", "--pid"]
        return [*entered, f"--wdns={cwd or self.folder}", *map(str, command)]

    def _children(self) -> list[str]:
        pid = self._head.pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    def _on_head(self, *command: object) -> str:
        done = self.run(*command)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(map(str, command))}: {done.stderr.strip()}")
        return done.stdout

    def sbatch(self, *words: object, cwd: Path, **environment: str) -> str:
        """Submit a job; its id."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd, environment=environment)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` prints of a job, by name: `JobState`, `Restarts`, ..."""
        words = self._on_head("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str, limit_s: float = 300) -> str:
        """Wait until a job is in one of the states; which."""
        wait_until(
            lambda: self.job(job)["JobState"] in states,
            what=f"{' or '.join(states)} of job {job}",
            limit_s=limit_s,
        )
        return self.job(job)["JobState"]

    def end_soon(self, job: str, seconds: int) -> None:
        """Let the time limit of a job be over in so many seconds, and its `--signal` before it."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self._on_head("scontrol", "update", f"JobId={job}", f"EndTime={at}")

    def power_on(self, node: str) -> None:
        """Start a node, with nothing running on it."""
        # The tests may have their files in /dev/shm, of which each node has its own.
        shared = Path(*self.folder.parts[:4])
        self._on_head("bash", "-c", _POWER_ON, "on", node, self.folder, shared)

    def power_off(self, node: str) -> None:
        """End a node as a power cut does: it falls silent, and its processes are gone."""
        self._on_head("bash", "-c", _POWER_OFF, "off", node, self.folder)

    def revive(self) -> None:
        """Cancel every job, start the nodes that are off, and wait until all are idle.

        A node that a job has drained is taken back.
        """
        self._on_head("scancel", "--user=root")
        for node in self.nodes:
            pid = int((self.folder / f"{node}.pid").read_text())
            if self.run("kill", "-0", pid).returncode:
                self.power_on(node)
        wait_until(self._becomes_idle, what="idle nodes of Slurm", limit_s=120)

    def _becomes_idle(self) -> bool:
        self.run("scancel", "--user=root")
        self.run("scontrol", "update", "NodeName=ALL", "State=RESUME")
        return self._is_idle()

    def stop(self) -> None:
        """End everything."""
        self._head.kill()
        self._head.wait()

    def _answers(self) -> bool:
        if self._head.poll() is not None:
            raise RuntimeError((self.folder / "log" / "head.out").read_text()[-1000:])
        return bool(self._children()) and "is UP" in self.run("scontrol", "ping").stdout

    def _is_idle(self) -> bool:
        shown = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").stdout.split()
        return shown == ["idle"] * len(self.nodes)


def main(arguments: Sequence[str]) -> int:
    """Run one of the verbs; 2 where this machine lacks something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("install")
    verbs.add_parser("check")
    verbs.add_parser("start").add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "install":
        install()
    elif reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    elif chosen.verb == "start":
        slurm = Slurm(chosen.folder.resolve())
        print(f"export SLURM_CONF={slurm.folder}/slurm.conf")
        print(f"{shlex.join(slurm.on_head('bash'))}   # a shell on the head; Ctrl-C ends all")
        try:
            slurm._head.wait()
        except KeyboardInterrupt:
            slurm.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
