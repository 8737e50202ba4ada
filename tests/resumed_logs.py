"""Logs of a job whose loss falls, and whose steps have the same loss in every attempt."""

from __future__ import annotations

import json
import random


def loss_at(step: int) -> float:
    own = random.Random(step)
    return (2.5 + 3 / step**0.5) * (1 + own.gauss(0, 0.002))


def rows(
    first: int,
    last: int,
    *,
    pace: float = 1.0,
    skipped_tokens: int = 0,
    raised_after: int | None = None,
) -> str:
    """What a job logs of these steps; no two attempts have the same throughput.

    Above `raised_after` the loss is 3 % higher.
    """
    raised = last if raised_after is None else raised_after
    return "".join(
        json.dumps(
            {
                "step": step,
                "loss": loss_at(step) * (1.03 if step > raised else 1.0),
                "tokens": step * 4096 + skipped_tokens,
                "tokens_per_second": 1000
                * pace
                * (1 + random.Random(f"{step} {first}").gauss(0, 0.01)),
            }
        )
        + "\n"
        for step in range(first, last + 1)
    )
