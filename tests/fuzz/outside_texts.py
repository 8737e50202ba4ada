"""Feed mutated logs, dumps, heartbeats, states, ledgers and records to what reads them.

    python tests/fuzz/outside_texts.py [--seconds 600] [--seed 0]

Each reader gets a real sample with random mutations and numbers that are out of bounds. It may
answer or refuse by a `CkptctlError`; anything else is a bug, and printed with its seed. The same
mutations run shortly in `test_outside_texts.py`. Takes nothing but the package.
"""

# ruff: noqa: E501 - the samples are lines as programs print them

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckptctl.diagnostics.slurm import check_script, read_script
from ckptctl.errors import CkptctlError
from ckptctl.failures.classifying import classify, host_names
from ckptctl.failures.rank_dumps import NotADump, compare_dumps, evidence_of, read_dump
from ckptctl.formats.own.files import as_stored
from ckptctl.formats.own.heartbeats import heartbeat_bytes, read_heartbeat
from ckptctl.formats.own.supervision import STATE_SCHEMA, read_state
from ckptctl.goodput.history import run_history
from ckptctl.loss.checking import check_loss
from ckptctl.selection.history import read_attempts, read_history
from ckptctl.storage.opening import open_store
from ckptctl.supervisor.evidence import stack_in

NUMBERS = (
    *(b"0", b"-1", b"1e999", b"-1e999", b"nan", b"inf", b"1e-999", b"0e99999999999999999999"),
    *(b"9" * n for n in (3, 5, 10, 19, 26, 400, 5_000)),
    *("²".encode(), "٣".encode(), b"1_0", b"0x10", b"1.", b".5", b"1,000", b"+7", b"00"),
)
"""What takes the place of a number."""
PIECES = (
    *(b"\n", b"\r", b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b"'", b":", b",", b" ", b"\x1b["),
    *("\u202e".encode(), b"\\u0000", b"\\", b"null", b"true", b"Traceback ", b"loss ", b"step "),
)


def mutated(sample: bytes, rng: random.Random) -> bytes:
    """The sample with a few random changes, half of them to its numbers."""
    data = bytearray(sample)
    for _ in range(rng.randint(1, 6)):
        digits = [at for at, byte in enumerate(data) if 48 <= byte < 58]
        if digits and rng.random() < 0.6:
            begin = end = rng.choice(digits)
            while begin and 48 <= data[begin - 1] < 58:
                begin -= 1
            while end < len(data) and 48 <= data[end] < 58:
                end += 1
            data[begin:end] = rng.choice(NUMBERS)
            continue
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at:at] = rng.choice(PIECES)
            case 1:
                del data[at : at + rng.randint(1, 30)]
            case 2:
                data[at:at] = data[at // 2 : at // 2 + rng.randint(1, 200)]
            case _:
                data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)


Reader = Callable[[Path, bytes], None]


def _put(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def log(folder: Path, data: bytes) -> None:
    """A log, as `classify` and `loss` read one; the border itself never fails."""
    path = _put(folder / "train-rank_0.log", data)
    for read in (lambda: classify(path), lambda: check_loss(path)):
        with suppress(CkptctlError):
            answer = read()
            assert not getattr(answer, "unread", ()), answer.unread


def script(_folder: Path, data: bytes) -> None:
    """A batch script."""
    check_script("job.sh", read_script(data.decode("utf-8", "backslashreplace")))


def dump(_folder: Path, data: bytes) -> None:
    """A dump of the flight recorder, beside a sound one."""
    with suppress(NotADump):
        dumps = [read_dump("trace_0", data), read_dump("trace_1", SAMPLES["dump"][0])]
        [*evidence_of(compare_dumps(dumps), "trace_0")]


def heartbeat(_folder: Path, data: bytes) -> None:
    """A heartbeat, signed as a process of the job signs it."""
    with suppress(ValueError):
        data = heartbeat_bytes(json.loads(data), "key")
    read_heartbeat(data, "key")


def stacks(_folder: Path, data: bytes) -> None:
    """What py-spy and faulthandler print."""
    stack_in(data.decode("utf-8", "replace"))
    host_names(data.decode("utf-8", "replace"))


def _in_root(folder: Path, name: str, data: bytes) -> None:
    _put(folder / "root" / ".ckptctl" / "attempts" / name, data)
    with open_store(str(folder / "root")) as store:
        [*read_attempts(store)]
        read_history(store)


def ledger(folder: Path, data: bytes) -> None:
    """The ledger of an attempt, and `history` of its root."""
    _in_root(folder, "20260101T000000.000000Z-00000000.jsonl", data)
    run_history(str(folder / "root"))


def state(folder: Path, data: bytes) -> None:
    """The state of the supervisor."""
    _put(folder / "state-root" / ".ckptctl" / "supervisor" / "0000000001.json", data)
    run_history(str(folder / "state-root"))
    read_state(data)


def record(folder: Path, data: bytes) -> None:
    """The record of a runbook."""
    from ckptctl.runbook.record import newest

    run = folder / "root2" / ".ckptctl" / "runbooks" / "rb-7" / "20260101T000000Z-000000"
    _put(run / "000001.json", data)
    with open_store(str(folder / "root2")) as store:
        newest(store, "rb-7")


LOG_SAMPLES = (
    (
        b"Nov 26 12:00:00 node017 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
        b"[rank3]:[E1120 03:12:44.123456 ProcessGroupNCCL.cpp:632] Watchdog caught a timeout\n"
        b"[Fri Nov 20 03:12:44 2026] Out of memory: Killed process 12 (python)\n"
    ),
    (
        b"2026-11-20 03:12:44,123 - INFO - step 1 loss 2.5 lr 1e-4 tokens 1,024\n"
        b"2026-11-20T03:12:45.9+05:30 step 2 loss 2.4 lr 1e-4\nresuming from step 2\nstep 3 loss 2.4\n"
    ),
    (
        b'{"step": 1, "loss": 2.5, "timestamp": 1790000000.5, "rank": 0}\n'
        b'{"step": 2, "loss": 2.4, "timestamp": "1790000010", "level": "ERROR", "message": "CUDA"}\n'
    ),
    (
        b" iteration 10/ 100 | consumed samples: 80 | elapsed time per iteration (ms): 12.5 | "
        b"learning rate: 1.0E-04 | lm loss: 2.5E+00 | grad norm: 1.0 |\n"
    ),
    (
        b'{"textPayload": "step 1 loss 2.5", "insertId": "1", "timestamp": "1790000000123"}\n'
        b'{"MESSAGE": ["115", "116", "101"], "__REALTIME_TIMESTAMP": "1790000000123456"}\n'
    ),
    b"2026-11-20T03:12:44.123Z stdout F step 1 loss 2.5\n",
    b"Epoch 1/3\n 1/20 [>....] - ETA: 1s - loss: 2.5\n20/20 - 1s 3ms/step - loss: 2.4\n",
    (
        b"GPU relative performance\nRank=0 Node=n1 Score=0.5\n times across ranks (ms):\n"
        b"  forward-compute:\n  rank  0: 12.5\n"
    ),
    (
        b'Traceback (most recent call last):\n  File "a.py", line 12, in f\n'
        b"torch.OutOfMemoryError: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB "
        b"of which 1.5 GiB is free. this process has 10.0 GiB\n"
        b"Root Cause (first observed failure):\n[0]:\n  host : n1\n  rank : 3 (local_rank: 3)\n=====\n"
    ),
    b"node1:12:13 [0] NCCL INFO comm 0x1 rank 3 nranks 8 cudaDev 0\nranks 0-3, 7 did not join\n",
    b"step,loss,lr\n1,2.5,1e-4\n2,2.4,1e-4\n",
)
ATTEMPT = {
    "number": 1,
    "started_at": "2026-11-20T03:12:44Z",
    "host": "n1",
    "seconds": 0.012,
    "exit_code": 1,
    "step": 20,
    "inspected": True,
    "progress": True,
    "free": False,
    "left": 2,
    "decision": "restart",
    "reason": "a",
    "cause": "hang",
    "section": "step",
    "ranks": [3],
    "nodes": ["n1"],
    "allocation": "a",
    "world_size": 8,
}
STATE = {
    "run": "0" * 32,
    "root": "/a",
    "best": 20,
    "not_finite": [],
    "owner": None,
    "attempts": [ATTEMPT],
    "excluded": [],
    "resets": [],
    "sections": {"step": {"n": 3, "longest_s": 0.009}},
}
SAMPLES: Mapping[str, tuple[bytes, ...]] = {
    "log": LOG_SAMPLES,
    "script": (
        (
            b"#!/bin/bash\n#SBATCH --signal=B:USR1@300\n#SBATCH --requeue\ntrap 'kill -USR1 $!' USR1\n"
            b"srun python train.py --save-timeout 900 --resume auto & wait\n"
        ),
    ),
    "dump": (
        (
            b'{"version": "2.9", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": '
            b'"[0, 1]"}}, "pg_status": {"0": {"last_enqueued_collective": "7"}}, "entries": '
            b'[{"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", '
            b'"collective_seq_id": 6, "p2p_seq_id": 0, "is_p2p": false, "state": "scheduled", '
            b'"input_sizes": [[4, 8]], "output_sizes": [[4, 8]], "input_dtypes": ["Float"], '
            b'"output_dtypes": ["Float"], "frames": [{"filename": "a.py", "line": 3, "name": "f"}]}, '
            b'{"process_group": ["0", "default_pg"], "profiling_name": "nccl:send 0->1", '
            b'"p2p_seq_id": 2, "collective_seq_id": 6, "is_p2p": true, "state": "scheduled"}]}'
        ),
    ),
    "heartbeat": (
        (
            b'{"rank":1,"local_world_size":8,"world_size":16,"node":"n1","pid":12,"started":345,'
            b'"count":7,"section":'
            b'"step","step":9,"saving":null,"stack_signal":12}'
        ),
    ),
    "stacks": (
        (
            b'Thread 12 (idle): "MainThread"\n    f (a.py:12)\n    <module> (train.py:3)\n'
            b'Current thread 0x00007f (most recent call first):\n  File "a.py", line 12 in f\n'
            b"node[017-018,020],gpu1\n"
        ),
    ),
    "ledger": (
        (
            b'{"at": "2026-11-20T03:12:44.000Z", "event": "saved", "attempt": '
            b'"20260101T000000.000000Z-00000000", "step": 12, "milliseconds": 300}\n'
            b'{"at": "2026-11-20T03:13:44.000Z", "event": "ended", "attempt": '
            b'"20260101T000000.000000Z-00000000", "step": 14}\n'
        ),
    ),
    "state": (as_stored(STATE_SCHEMA, STATE),),
    "record": (b'{"schema": "ckptctl/runbook-run/v1", "at": "2026-11-20T03:12:44Z", "n": 1}',),
}
READERS: Mapping[str, Reader] = {
    "log": log,
    "script": script,
    "dump": dump,
    "heartbeat": heartbeat,
    "stacks": stacks,
    "ledger": ledger,
    "state": state,
    "record": record,
}


def failures(name: str, seeds: Iterator[int], folder: Path, until_s: float) -> Iterator[str]:
    """Feed one reader until the time is over; each bug, with the seed that shows it."""
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        data = mutated(rng.choice(SAMPLES[name]), rng)
        try:
            READERS[name](folder, data)
        except CkptctlError:
            pass
        except Exception:  # noqa: BLE001 - whatever it is, it is a bug
            yield f"{name}, seed {seed}: {data[:400]!r}\n{traceback.format_exc()[-1500:]}"
        if time.monotonic() > until_s:
            return


def main() -> int:
    """Feed every reader for its share of the time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all readers together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    n_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in READERS:
            until_s = time.monotonic() + given.seconds / len(READERS)
            seeds = iter(range(given.seed, sys.maxsize))
            for failure in failures(name, seeds, Path(folder), until_s):
                n_failed += 1
                print(failure, flush=True)
            print(f"{name}: done up to seed {next(seeds) - 1}", flush=True)
    return 1 if n_failed else 0


if __name__ == "__main__":
    os.environ.pop("CKPTCTL_JSON", None)
    sys.exit(main())
