"""A Ray job that runs one command on each of several nodes, then another command once.

    python -m executor.launch.ray_nodes --nodes 2 --gpus-per-node 8 [--names] [--meet] [--then WORDS] -- COMMAND

It is the entry point of the job. A placement group reserves a bundle on each node; the command runs there in a task,
and ends with it. The output of the commands is printed.

Sources: Ray's documentation of placement groups (STRICT_SPREAD), of tasks, and of job submission, which sends SIGTERM
to the entry point of a job that is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray.util
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executor.launch.process_exit import interrupt_on_sigterm

ROOM_S = 300.0  # seconds for the cluster to have room
PEERS_S = 10.0  # seconds for nodes to end by themselves after one was lost
ENDING_S = 20.0  # seconds for their agents to write their results after a request to end
LOST = 75  # exit code of a job that lost a node: EX_TEMPFAIL of sysexits.h


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on all nodes and return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(prog="executor.launch.ray_nodes")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--room", type=float, default=ROOM_S, help="seconds to wait for nodes that are free")
    parser.add_argument("--names", action="store_true", help="add --names, the nodes' names, to the commands")
    parser.add_argument("--meet", action="store_true", help="add --endpoint and --address to the command")
    parser.add_argument("--then", default="", help="JSON list: a command to run here after that")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    interrupt_on_sigterm()
    ray.init(log_to_driver=False)
    try:
        return _run(options, words)
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, words: list[str]) -> int:
    bundle = {"CPU": 1.0, **({"GPU": float(options.gpus_per_node)} if options.gpus_per_node else {})}
    group = placement_group([bundle] * options.nodes, strategy="STRICT_SPREAD")
    if not group.wait(options.room):
        asked = f"{options.nodes} nodes with {options.gpus_per_node} GPUs and a core each"
        print(f"Ray found no {asked} that are free within {options.room:.0f} s; it has {_has()}")
        return 1
    # Placement groups reserve cores; a run may use any number, as under other schedulers.
    tasks = [
        PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
        for number in range(options.nodes)
    ]
    found = ray.get([_task(look, one, options.gpus_per_node).remote() for one in tasks])
    names = _names([one["host"] for one in found], [one["address"] for one in found])
    shared = [f"--names={','.join(names)}"] if options.names else []
    if options.meet and options.nodes > 1:
        shared.append(f"--endpoint={found[0]['address']}:{found[0]['port']}")
    running = {}
    for task, name, one in zip(tasks, names, found, strict=True):
        own = [f"--address={one['address']}"] if options.meet and options.nodes > 1 else []
        running[_task(on_node, task, options.gpus_per_node).remote([*words, *shared, *own], name)] = name
    code = _wait(running)
    if options.then:
        then = [*json.loads(options.then), *shared[:1]]
        code = subprocess.run([sys.executable, *then[1:]], check=False).returncode or code
    return code


def _task(function: Any, where: PlacementGroupSchedulingStrategy, gpus: int) -> Any:
    # A retry would measure a run that may be reported already.
    return ray.remote(function).options(num_cpus=1, num_gpus=gpus, max_retries=0, scheduling_strategy=where)


def _wait(running: dict[Any, str]) -> int:
    """Print the output of the nodes' commands, and return the first exit code other than 0."""
    code, left, ends = 0, list(running), float("inf")
    while left and time.monotonic() < ends:
        done, left = ray.wait(left, timeout=1.0)
        for one in done:
            try:
                ended, text = ray.get(one)
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines() or ["no word"]
                print(f"node {running[one]} was lost: {lines[0]}", flush=True)
                code, ends = code or LOST, time.monotonic() + PEERS_S
                continue
            sys.stdout.write(text)
            code = code or ended
    for one in left:
        ray.cancel(one)
    if left:
        ray.wait(left, num_returns=len(left), timeout=ENDING_S)
    return code


def _names(hosts: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Return distinct names: those of the hosts, or their addresses."""
    return list(hosts if len(set(hosts)) == len(hosts) else addresses)


def _has() -> str:
    rows = [
        f"{one['NodeManagerHostname']} with {one['Resources'].get('GPU', 0):g} GPUs"
        for one in ray.nodes()
        if one["Alive"]
    ]
    return ", ".join(rows) or "no nodes"


def look() -> dict[str, Any]:
    """Return a node's host name, its address in the cluster, and a free port there."""
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as server:
        return {"host": socket.gethostname(), "address": address, "port": server.getsockname()[1]}


def on_node(words: list[str], name: str) -> tuple[int, str]:
    """Run a command on this node; return its exit code and the end of its output."""
    guarded = [sys.executable, "-m", "executor.launch.guard", str(os.getpid()), sys.executable, *words[1:]]
    environment = {**os.environ, "MESHWRIGHT_NODE": name}
    process = subprocess.Popen(
        guarded, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    try:
        text, _ = process.communicate()
    except BaseException:  # cancelled, or the worker is being ended
        process.terminate()
        process.wait(30)
        raise
    return process.returncode, text[-65536:]


if __name__ == "__main__":
    sys.exit(main())
