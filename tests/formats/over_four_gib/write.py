"""Write what `torch.save` puts around more than 4 GiB of elements.

    python tests/formats/over_four_gib/write.py

Writes `head.bin` and `tail.bin` beside this script: all that `torch.save` writes
before and after 4 GiB and 1,000 bytes of zeros, which are not kept. The committed
files are those of torch 2.13.
"""

import mmap
from pathlib import Path

import torch

N_BYTES = 2**32 + 1_000


class Around:
    """A file that keeps small writes and counts large ones."""

    def __init__(self) -> None:
        self.head = b""
        self.tail = b""
        self.n_bytes = 0

    def write(self, data: bytes) -> int:
        if len(data) >= 1 << 20:
            self.n_bytes += len(data)
        elif self.n_bytes < N_BYTES >> 20 << 20:
            self.head += data
        else:
            self.tail += data
        return len(data)

    def flush(self) -> None:
        """torch calls this when it has written all."""


def main() -> None:
    file = Around()
    with mmap.mmap(-1, N_BYTES) as zeros:  # pages that are only read take no memory
        elements = torch.frombuffer(zeros, dtype=torch.uint8)
        torch.save(elements, file)
        del elements
    here = Path(__file__).parent
    (here / "head.bin").write_bytes(file.head)
    (here / "tail.bin").write_bytes(file.tail[N_BYTES - file.n_bytes :])


if __name__ == "__main__":
    main()
