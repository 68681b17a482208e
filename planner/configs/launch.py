"""What a launch line says: how many GPUs, and arguments of the program that it starts."""

from __future__ import annotations

from typing import Any

from planner.configs.command_line import CommandLine, typed
from planner.configs.transformers_fields import LENGTHS, MICRO, STEPS


def launch_facts(line: str) -> dict[str, Any]:
    """Return what a launch line says: GPUs, and the program's arguments in the words of Transformers."""
    if not line:
        return {}
    said = CommandLine(line, "--launch", lambda _: None)
    return launch_of(said)


def launch_of(said: CommandLine) -> dict[str, Any]:
    """Return what a command line says of its GPUs and, in the words of Transformers, of its batch."""
    values = said.settings
    found: dict[str, Any] = {}

    def count(*names: str) -> int | None:
        return next((values[name] for name in names if type(values.get(name)) is int), None)

    each = count("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--gpus-per-node")
    each = each or said.variable("GPUS_PER_NODE", "NPROC_PER_NODE", "GPUS", "NUM_GPUS")
    each = each or _directive(said, "gpus-per-node", "ntasks-per-node", "gres")
    nodes = count("--nnodes", "--num_nodes", "--nodes", "--num_machines") or said.variable("NNODES", "NUM_NODES")
    nodes = nodes or _directive(said, "nodes")
    total = count("--num_processes") or said.variable("WORLD_SIZE")
    if total or each:
        found["gpus"] = total or (each or 1) * (nodes or 1)
    for name, key in (("micro_batch", MICRO), ("steps", STEPS)):
        if (value := count(f"--{key}")) is not None:
            found[name] = value
    for key in LENGTHS:
        if (value := count(f"--{key}")) is not None:
            found["seq_len"] = value
    if values.get("--gradient_checkpointing") is True:
        found["recompute"] = "full"
    for name in ("bf16", "fp16"):
        if values.get(f"--{name}") is True:
            found[name] = True
    return found


def _directive(said: CommandLine, *names: str) -> int | None:
    for name in names:
        value = typed(str(said.directives.get(name, "")).rpartition(":")[2])
        if type(value) is int:
            return value
    return None
