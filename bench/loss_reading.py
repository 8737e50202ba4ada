"""Reading a training log, beside programs that count its lines: processor time of processes.

Two logs of the form that Megatron-LM prints: one in which a line in twenty is a step,
as in what a job writes altogether, and one of steps alone, a fifth as large. One of a custom
training loop, beside a loop over its lines in Python, with and without one `re.search` a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from measuring import Row, Size, folder, least, processes, python

MEGABYTES = 250
STEP = (
    " [2025-05-09 06:11:20] iteration {step:8}/ 4000000 | consumed samples: {samples:12} |"
    " elapsed time per iteration (ms): 3286.6 | throughput per GPU (TFLOP/s/GPU): 30.2 |"
    " learning rate: 6.666667E-05 | global batch size:    32 | lm loss: {loss:.6E} |"
    " loss scale: 1.0 | grad norm: 6.350 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |\n"
)
NOISE = (
    "[default0]:[NCCL INFO] Channel {n:02}/0 : 1[1] -> 0[0] via P2P/CUMEM comm 0x55d nRanks 16\n"
    "[default3]:2025-05-09 06:11:20 WARNING dataloader worker {n} waited 0.31 s for its shard\n"
)
READER = (
    "import sys\n"
    "from ckptctl.logs.reading import read_logs\n"
    "print(sum(1 for _ in read_logs([sys.argv[1]])))\n"
)
PLAIN = (
    "2026-11-20 03:{minute:02}:{second:02},123 - INFO - step {step} loss {loss:.4f} lr {rate:.3e} "
    "grad_norm {norm:.3f}\n"
)
LOOP = "import sys\nprint(sum(1 for _ in open(sys.argv[1])))\n"
SEARCH = (
    "import re, sys\n"
    "search = re.compile(r' loss (\\S+)').search\n"
    "print(sum(search(line) is not None for line in open(sys.argv[1])))\n"
)
N_PLAIN = 1_000_000
SEARCH_GOAL = 40
"""Of 0.25 µs for one search on an idle core: 10 µs."""
LOGS = (
    # name, share of the size, lines between two steps
    ("a step in 20 lines", 1.0, 19),
    ("steps alone", 0.2, 0),
)


def make_log(path: Path, n_bytes: int, noise_lines: int) -> int:
    """Write a log; returns how many steps are in it."""
    noise = "".join(NOISE.format(n=n) for n in range(noise_lines // 2))
    written = n_steps = 0
    with path.open("w") as file:
        while written < n_bytes:
            block = []
            for _ in range(1_000):
                n_steps += 1
                loss = 11 - 8 * n_steps / 4_000_000
                block.append(STEP.format(step=n_steps, samples=32 * n_steps, loss=loss) + noise)
            written += file.write("".join(block))
    return n_steps


def plain_rows(size: Size) -> Iterator[Row]:
    """The log of a custom training loop beside loops in Python."""
    n_rows = round(size.of(N_PLAIN))
    with folder() as parent:
        path = Path(parent, "train.log")
        with path.open("w") as file:
            for step in range(1, n_rows + 1):
                file.write(
                    PLAIN.format(
                        step=step,
                        minute=step // 60 % 60,
                        second=step % 60,
                        loss=11 - 8 * step / n_rows + step % 7 / 100,
                        rate=3e-4 * (1.001 - step / n_rows),
                        norm=1 + step % 11 / 13,
                    )
                )
        programs = {"loop": LOOP, "search": SEARCH, "ours": READER}
        commands = {name: python(program, path) for name, program in programs.items()}
        taken = processes(commands, size.rounds)
    assert all(int(runs[0].printed) == n_rows for runs in taken.values())
    what = f"{n_rows:,} plain rows"
    ours = 1e6 * least(taken, "ours") / n_rows
    peers = (("loop", "`for line in file`", None), ("search", "`re.search` a line", SEARCH_GOAL))
    for peer, shown, goal in peers:
        yield Row(what, ours, "µs a step", 1e6 * least(taken, peer) / n_rows, shown, goal=goal)
    yield Row(f"memory, {what}", least(taken, "ours", "peak_mib"), "MiB")


def rows(size: Size) -> Iterator[Row]:
    """Each log beside its peers."""
    yield from plain_rows(size)
    for name, share, noise_lines in LOGS:
        with folder() as parent:
            path = Path(parent, "train.log")
            n_steps = make_log(path, round(size.of(MEGABYTES * 1_000_000) * share), noise_lines)
            taken = processes(
                {
                    "wc": ["wc", "-l", path],
                    "grep": ["grep", "-c", "lm loss", path],
                    "ours": python(READER, path),
                },
                size.rounds,
                {"LC_ALL": "C"},
            )
            megabytes = path.stat().st_size / 1e6
        assert int(taken["grep"][0].printed) == int(taken["ours"][0].printed) == n_steps
        what = f"{name}, {megabytes:,.0f} MB, {n_steps:,} steps"
        ours = 1e6 * least(taken, "ours") / n_steps
        for peer, shown in (("wc", "`wc -l`"), ("grep", "`grep -c`")):
            theirs = 1e6 * least(taken, peer) / n_steps
            yield Row(what, ours, "µs a step", theirs, shown)
        yield Row(f"memory, {what}", least(taken, "ours", "peak_mib"), "MiB")
