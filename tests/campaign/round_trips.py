"""Reshard or convert thousands of random steps, and back; every byte must be the same.

    python tests/campaign/round_trips.py [--examples 1500] [--minutes 10] [--seed N]

The properties of `tests/resharding`, with new random examples in every call: tensors,
slices, meshes and world sizes, resharded and back, and converted to a `torch.save` file
and to safetensors and back. Stops after so many examples of each property, or at the time
limit, and prints how many there were. Ends with 1 and the smallest failing example if a
property does not hold.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, seed, settings

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "resharding"), str(HERE.parent.parent)]

from test_reshard_properties import (  # noqa: E402
    OUT_AND_IN,
    THERE_AND_BACK,
    drawn,
    out_and_in,
    there_and_back,
)

A_ROUND = 50
PROPERTIES: Mapping[str, tuple[Callable[..., None], Mapping[str, Any]]] = {
    "resharded and back": (there_and_back, THERE_AND_BACK),
    "converted and back": (out_and_in, OUT_AND_IN),
}
IN_MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description="Send random steps there and back.")
    parser.add_argument("--examples", type=int, default=1500, help="of each property")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    warnings.filterwarnings("ignore", "ComplexHalf support")
    if IN_MEMORY.is_dir():
        # The properties concern bytes, not disks.
        tempfile.tempdir = str(IN_MEMORY)
    began_s = time.monotonic()
    counts = dict.fromkeys(PROPERTIES, 0)
    number = options.seed
    while min(counts.values()) < options.examples:
        for name, (holds, arguments) in PROPERTIES.items():
            n_more = min(A_ROUND, options.examples - counts[name])
            counts[name] += round_of(holds, arguments, n_more, number)
            number += 1
        said = ", ".join(f"{n:,} {name}" for name, n in counts.items())
        print(f"{time.monotonic() - began_s:5.0f} s: {said}", flush=True)
        if time.monotonic() - began_s > 60 * options.minutes:
            break
    print(f"{sum(counts.values()):,} examples, and not a byte was another")


def round_of(holds: Callable[..., None], arguments: Mapping[str, Any], n: int, number: int) -> int:
    """How many examples were tried; raises what the first failing one raises."""
    n_tried = 0

    @settings(drawn(n), database=None)
    @seed(number)
    @given(**arguments)
    def tried(**example: object) -> None:
        nonlocal n_tried
        n_tried += 1
        holds(**example)

    if n > 0:
        tried()
    return n_tried


if __name__ == "__main__":
    main()
