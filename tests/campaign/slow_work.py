"""Run slow but sound work under hang detection for half an hour; no attempt may be ended.

    python tests/campaign/slow_work.py [--minutes 30] [--seed 1] [--speed 20]

Real jobs of two gloo ranks under torchrun train one after the other under `ckptctl run`, each in
a root of its own, so that each learns its limits anew. Steps, saves, evaluations and data
loaders exceed the limits now and then; the job is requeued, suspended as `scontrol suspend`
does it, and so is `run`. All of it is sound, so no attempt may end as a hang. The built-in
limits are divided by `--speed`: half an hour covers ten hours of a job. Ends with 1 if a job
was ended for a hang, did not end with 0, or if no limit was ever exceeded: the soak would have
proved nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
for place in (REPOSITORY, REPOSITORY / "tests"):
    sys.path.insert(0, str(place))

from ckptctl.supervisor import options  # noqa: E402

JOB_S = 240.0
"""How long one job trains."""
AGAIN = 75
"""How the job asks to be requeued: it costs nothing of the budget."""


# The job: slow_work.py train ROOT SEED SPEED SECONDS


def train(root: str, seed: int, speed: float, seconds: float) -> None:
    """Train for so many seconds in all attempts; all ranks draw the same slow sections."""
    import torch
    import torch.distributed as dist

    from ckptctl.train import Checkpointer, heartbeat

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["CKPTCTL_RESTART_COUNT"])

    def longer_than(section: options.Section) -> float:
        """Seconds that pass the least limit of a section, and at times the first one."""
        built_in = options._BUILT_IN[section]
        return draw.uniform(built_in.least_s, 1.5 * min(built_in.first_s, 900)) / speed

    def work(seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            _climb(int(1000 * time.monotonic()) % 40)

    class Slow:
        """State that takes as long to save as its `seconds`."""

        seconds = 0.0

        def state_dict(self) -> dict[str, int]:
            work(self.seconds)
            return {"value": 1}

        def load_state_dict(self, _state: object) -> None:
            pass

    slow = Slow()
    model = torch.nn.Linear(4, 4)
    with Checkpointer(root, model=model, extra={"slow": slow}) as checkpointer:
        start = checkpointer.resume()
        began = Path(f"{root}.began")
        if rank == 0 and not began.exists():
            began.write_text(str(time.time()))
        dist.barrier()
        until_s = float(began.read_text()) + seconds
        draw = random.Random(seed + start.step)
        step = start.step
        while True:
            step += 1
            event = draw.choices(
                ("step", "slow", "beside", "save", "slow save", "async", "evaluation", "again"),
                (200, 2, 2, 4, 1, 4, 1, 0 if step < start.step + 50 else 1),
            )[0]
            place = draw.randrange(size)
            time.sleep(0.02)
            if event == "slow":
                seconds = longer_than("step")
                if place == rank:
                    work(seconds)
            elif event == "beside":  # as a worker of a data loader
                seconds = longer_than("step")
                if place == rank:
                    _beside(seconds)
            elif event == "evaluation":
                heartbeat("evaluation")
                seconds = longer_than("evaluation")
                if place == rank:
                    _beside(seconds)
                dist.barrier()
            total = torch.ones(1)
            # The time is up for all ranks in the same step.
            over = torch.tensor([float(rank == 0 and time.time() > until_s)])
            dist.all_reduce(total)
            dist.all_reduce(over)
            checkpointer.note(step)
            slow.seconds = longer_than("checkpoint") if event == "slow save" else 0.0
            if event in ("save", "slow save", "again") or over:
                checkpointer.save(step)
            elif event == "async":
                checkpointer.save_async(step)
            if over or (event == "again" and attempt < 20):
                break
    dist.destroy_process_group()
    # torchrun turns every failure into 1: the file is what asks for a requeue.
    if not over and rank == 0:
        Path(f"{root}.again").touch()


def _climb(depth: int) -> None:
    if depth:
        _climb(depth - 1)


def _beside(seconds: float) -> None:
    """Work in a process of its own."""
    text = f"import time; end = time.time() + {seconds}\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", text], check=True)


# The supervisor: slow_work.py supervise SPEED ARGUMENTS


def supervise(speed: float, arguments: list[str]) -> None:
    """Be `ckptctl run` with limits that are divided by `speed`."""
    from ckptctl.cli.main import main as run

    options._BUILT_IN = {
        section: options._BuiltIn(each.first_s / speed, each.least_s / speed, each.enough)
        for section, each in options._BUILT_IN.items()
    }
    options.LONGEST_S /= speed
    sys.argv = ["ckptctl", *arguments]
    sys.exit(run())


# The soak


def soak(minutes: float, seed: int, speed: float) -> int:
    """Run jobs until the time is over; the exit code."""
    draw = random.Random(seed)
    until_s = time.monotonic() + 60 * minutes
    counts: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ckptctl-slow-") as folder:
        while (left_s := until_s - time.monotonic()) > 30:
            counts["jobs"] += 1
            root = Path(folder, str(counts["jobs"]))
            faults += one_job(root, draw, speed, min(JOB_S, left_s), counts)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))
    if not counts["limits passed by work"]:
        faults.append("no limit was passed: nothing was proved")
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"{len(faults)} faults, seed {seed}, speed {speed:g}")
    return bool(faults)


def one_job(
    root: Path, draw: random.Random, speed: float, seconds: float, counts: Counter[str]
) -> list[str]:
    """Run one job to its end, and suspend it meanwhile; what went wrong."""
    seed = draw.randrange(1 << 30)
    job = [__file__, "train", str(root), str(seed), str(speed), str(seconds)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = (
        f'"$@"; code=$?; if [ -e {root}.again ]; then rm {root}.again; exit {AGAIN}; fi; exit $code'
    )
    run = subprocess.Popen(
        [
            *(sys.executable, __file__, "supervise", str(speed)),
            *("run", "--root", str(root), "--create", "--backoff", "0"),
            *("--report", f"{root}.json", "--", "sh", "-c", script, "job"),
            *(*launch, "--nproc-per-node", "2", *job),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    while True:
        try:
            _, err = run.communicate(timeout=draw.uniform(30, 120))
            lines += err.splitlines()
            break
        except subprocess.TimeoutExpired:
            suspend(run.pid, draw, counts)
    attempts = json.loads(Path(f"{root}.json").read_text())["attempts"]
    counts["attempts"] += len(attempts)
    counts["steps"] += attempts[-1]["step"] or 0
    counts["limits passed by work"] += sum("but the job works" in line for line in lines)
    faults = [f"{each}" for each in attempts if each["cause"] == "hang"]
    if run.returncode or faults:
        faults.append(f"{root.name} ended with {run.returncode}: {' / '.join(lines)}")
    return faults


def suspend(run: int, draw: random.Random, counts: Counter[str]) -> None:
    """Stop the whole job, or `run` alone, for a while; a job of a batch system is stopped so."""
    of_job = below(run)
    stopped = draw.choice((of_job, [run]))
    counts["suspensions"] += 1
    for number, pause_s in ((signal.SIGSTOP, draw.uniform(5, 20)), (signal.SIGCONT, 0.0)):
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause_s)


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found: list[int] = []
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *below(int(child))]
    return found


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["train"]:
        train(words[1], int(words[2]), float(words[3]), float(words[4]))
        return 0
    if words[:1] == ["supervise"]:
        supervise(float(words[1]), words[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--speed", type=float, default=20)
    given = parser.parse_args()
    return soak(given.minutes, given.seed, given.speed)


if __name__ == "__main__":
    sys.exit(main())
