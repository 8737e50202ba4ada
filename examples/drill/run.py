"""Drill a real job on two nodes, unattended, and check the whole chain.

    python examples/drill/run.py [--fault NAME …] [--seed N]

Trains a few steps on 4 ranks, then `ckptctl drill` injects faults into copies of the job. Where a
rank hangs, the chain must be: the evidence names rank and node, RB-7 leaves the node out and
verifies a step, 2 ranks resume from it, and their losses are those of the run without a fault,
in every digit. Works below `drill/` in the current folder; logs and reports remain there.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER, ROOT, HOSTS = Path("drill"), Path("drill/ckpt"), Path("drill/hosts")
NODES = ("node-1", "node-2")
HANG = "rank-stopped"


def main() -> int:
    """Run the drill; 0 where the job survives every fault and the chain is whole."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    HOSTS.write_text("".join(f"{node}\n" for node in NODES))
    print("4 ranks on 2 nodes train 12 steps, and save them", flush=True)
    train = [sys.executable, str(HERE / "launch.py"), str(HOSTS)]
    with (FOLDER / "train.log").open("wb") as log:
        script = [str(HERE / "train.py"), "--steps", "12", "--root", str(ROOT)]
        code = _run([*train, "4", *script], stdout=log, stderr=log)
    if code:
        print(f"the job ended with {code}; see {FOLDER / 'train.log'}")
        return code
    drill = ["drill", "--root", str(ROOT), "--work", str(FOLDER / "faults")]
    drill += ["--nodes", ",".join(NODES), "--world-sizes", "4,2", "--hosts-file", str(HOSTS)]
    drill += ["--report", str(FOLDER / "drill.json"), *sys.argv[1:], "--"]
    command = [*drill, *train, "{world_size}", str(HERE / "train.py"), "--root", "{root}"]
    print(f"$ ckptctl {shlex.join(command)}", flush=True)
    code = _run([sys.executable, "-P", "-m", "ckptctl", *command])
    shutil.rmtree(ROOT, ignore_errors=True)
    if code:
        return code
    trials = json.loads((FOLDER / "drill.json").read_text())["trials"]
    missing = [each for trial in trials if trial["fault"] == HANG for each in _missing(trial)]
    for each in missing:
        print(f"{HANG}: {each}")
    return int(bool(missing))


def _run(command: Sequence[str], **streams: Any) -> int:
    """Run a command to its end, and pass on the signals that ask to end; its exit code."""
    process = subprocess.Popen(command, **streams)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: process.send_signal(received))
    return process.wait()


def _missing(trial: dict[str, Any]) -> Iterator[str]:
    """The links of the chain that are missing after a hang."""
    if trial["cause"] != "hang" or len(trial["ranks"]) != 1:
        yield f"the hang is not traced to one rank: {trial['cause']}, {trial['ranks']}"
    for kind in ("stacks", "flight-recorder"):
        if not any(f"{kind}-rank" in file for file in trial["evidence"]):
            yield f"no {kind} were collected: {trial['evidence']}"
    if len(trial["excluded"]) != 1 or trial["excluded"] != trial["nodes"]:
        yield f"the nodes {trial['nodes']} were named, and {trial['excluded']} excluded"
    if trial["world_size"] != 2:
        yield f"it was resumed with {trial['world_size']} ranks instead of 2"
    expected = _losses(FOLDER / "faults" / "no-fault" / "logs" / "1" / "output.log")
    found = _losses(FOLDER / "faults" / HANG / "resumed.log")
    both = expected.keys() & found.keys()
    if not both or any(expected[step] != found[step] for step in both):
        yield f"of {len(both)} losses, not all equal those of the run without a fault"
    else:
        print(f"{HANG}: {len(both)} losses of 2 ranks equal those of 4 ranks in every digit")


def _losses(log: Path) -> dict[int, tuple[float, str]]:
    """Loss and samples of each step that a log holds."""
    rows = (json.loads(line) for line in log.read_text().splitlines() if line[:8] == '{"step":')
    return {row["step"]: (row["loss"], row["samples_digest"]) for row in rows}


if __name__ == "__main__":
    sys.exit(main())
