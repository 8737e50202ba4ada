"""A training that writes down what a stop-watch shows, and kills itself where it is asked to.

timed_job.py ROOT WATCH KILLS: each step and each save takes a while; attempt N of the job
(`CKPTCTL_RESTART_COUNT`) kills itself after step N of KILLS, such as `7,13`. Lines of WATCH are
`PROCESS EVENT STEP SECONDS`, by the clock that all processes share.
"""

from __future__ import annotations

import os
import signal
import sys
import time

WATCH = open(sys.argv[2], "a", buffering=1)  # noqa: SIM115  # open as long as the process lives
ATTEMPT = int(os.environ["CKPTCTL_RESTART_COUNT"])


def press(event: str, step: int = 0) -> None:
    """Write down the time."""
    WATCH.write(f"{ATTEMPT} {event} {step} {time.monotonic():.6f}\n")


press("process")

import torch  # noqa: E402

from ckptctl.train import Checkpointer  # noqa: E402


class Slow:
    """State that takes a while to save and to load."""

    def state_dict(self) -> dict[str, int]:
        time.sleep(0.5)
        return {"value": 1}

    def load_state_dict(self, _state: object) -> None:
        time.sleep(1)


def main() -> None:
    kills = [int(word) for word in sys.argv[3].split(",")]
    last = kills[ATTEMPT] if len(kills) > ATTEMPT else kills[-1] + 4
    model = torch.nn.Linear(4, 4)
    with Checkpointer(sys.argv[1], model=model, extra={"slow": Slow()}) as checkpointer:
        press("resume")
        start = checkpointer.resume()
        press("resumed", start.step)
        for step in range(start.step + 1, last + 1):
            time.sleep(1.5 if step == start.step + 1 else 0.5)
            checkpointer.note(step)
            press("step", step)
            if step % 4 == 0:
                press("save", step)
                checkpointer.save(step)
                press("saved", step)
        if len(kills) > ATTEMPT:
            press("end", last)
            os.kill(os.getpid(), signal.SIGKILL)
    press("end", last)


main()
