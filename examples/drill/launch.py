"""Start a script on several nodes, as `mpirun --hostfile` does, with all nodes on this machine.

    launch.py HOSTS WORLD_SIZE SCRIPT [ARGUMENT …]

HOSTS has one node a line. Each gets a torchrun agent with its share of the ranks, and finds its
name in SLURMD_NODENAME, as under srun. When one agent fails, the others are ended, and
`launch.py` ends with 1, as `srun --kill-on-bad-exit` does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Start an agent for each node, and wait for all of them."""
    nodes = Path(sys.argv[1]).read_text().split()
    n_ranks = int(sys.argv[2]) // len(nodes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--nproc-per-node={n_ranks}"]
    agents: list[subprocess.Popen[bytes]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: [agent.terminate() for agent in agents])
    for n, node in enumerate(nodes):
        environment = {**os.environ, "SLURMD_NODENAME": node, "OMP_NUM_THREADS": "1"}
        words = [*torchrun, f"--node-rank={n}", *sys.argv[3:]]
        agents.append(subprocess.Popen(words, env=environment))
    while None in (codes := [agent.poll() for agent in agents]):
        if any(codes):
            for agent in agents:
                agent.terminate()
        time.sleep(0.1)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
