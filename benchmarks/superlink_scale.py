"""What SuperNodes that wait for work cost a SuperLink.

Run `python -m benchmarks.superlink_scale [--nodes N]`.

Starts a SuperLink on this machine with its database on disk, without TLS. Nodes join it from this
process, and ask it for messages as a SuperNode does every three seconds. Measures the SuperLink's
CPU seconds for a node that joins and for a request, and its memory. The last line is one JSON
object. It needs flwr.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from flwr.supernode.fleet_http_connection import http_request_response

PORT = 8556
EVERY = 3.0  # seconds between two requests of a SuperNode of flwr 1.41


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> float:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measured(pid: int, nodes: int, requests: int) -> dict[str, float]:
    """Let nodes join, and ask for messages in turn.

    Args:
        pid: of the SuperLink.
        nodes: how many join.
        requests: of each.
    """
    with ExitStack() as stack:
        at, memory = cpu_seconds(pid), megabytes(pid)
        joined = [
            stack.enter_context(http_request_response(f"127.0.0.1:{PORT}", True))
            for _ in range(nodes)
        ]
        after, began = cpu_seconds(pid), time.perf_counter()
        for _ in range(requests):
            for node in joined:
                node[1]()  # receive
        wall, done = time.perf_counter() - began, cpu_seconds(pid)
        a_request = (done - after) / (nodes * requests)
        return {
            "nodes": nodes,
            "cpu_ms_a_join": 1e3 * (after - at) / nodes,
            "cpu_ms_a_request": 1e3 * a_request,
            "requests_a_second": nodes * requests / wall,
            "megabytes": megabytes(pid) - memory,
            "waiting_nodes_a_core": EVERY / a_request,  # computed
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="superlink-") as folder:
        program = str(Path(sys.executable).parent / "flower-superlink")
        options = ["--insecure", "--port", str(PORT), "--isolation", "process"]
        environment = {**os.environ, "FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0"}
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(
                [program, *options, "--database", f"{folder}/link.db"],
                stdout=log,
                stderr=log,
                env=environment,
            )
            try:
                time.sleep(15.0)
                print(json.dumps(measured(process.pid, chosen.nodes, chosen.requests)))
            finally:
                process.terminate()
                process.wait(30)


if __name__ == "__main__":
    main()
