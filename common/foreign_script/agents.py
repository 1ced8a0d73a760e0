"""Starts an agent of torchrun for each of several nodes, all on this machine.

python agents.py NODES RANKS_OF_A_NODE script.py ARGUMENTS
"""

from __future__ import annotations

import socket
import subprocess
import sys


def main() -> None:
    nodes, ranks, *script = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = [f"--nnodes={nodes}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc_per_node={ranks}"]
    agents = [subprocess.Popen([*torchrun, f"--node_rank={node}", *script]) for node in range(int(nodes))]
    sys.exit(max(abs(agent.wait()) for agent in agents))


if __name__ == "__main__":
    main()
