"""Whether Slurm has what a job needs, before one is queued: what it declares, and what a short job finds on its nodes.

Sources: sinfo(1), srun(1), gres.conf(5).
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.runs.schedulers.launchers import PORT
from topology import codec
from topology.codec import JsonObject
from topology.errors import PlannerError

COMMANDS = ("sinfo", "srun", "sbatch", "squeue", "scontrol", "scancel")
USABLE = frozenset({"idle", "mixed", "allocated", "completing"})
ASK_S, NODES_FREE_S, CHECK_S = 30.0, 30, 120.0
ERROR, WARNING, INFO = "error", "warning", "info"
NODE_CHECK = "executor.launch.node_check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One thing that was looked at. `severity` is error where a job would fail by it."""

    code: str
    severity: str
    what: str
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Declared:
    """A node as Slurm declares it."""

    name: str
    state: str
    gpus: int


def check_slurm(nodes: int, gpus_per_node: int | None, *, folder: Path, python: str = "python3") -> list[Checked]:
    """Return what was found, faults first. Without `gpus_per_node` a job asks for as many as nodes declare."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        why = "they are installed where jobs may be submitted"
        return [
            _error("commands", f"{', '.join(missing)} not found", why, "run this on a login node, or load a module")
        ]
    declared = _declared()
    if isinstance(declared, Checked):
        return [declared]
    most = max((one.gpus for one in declared), default=0)
    gpus = most if gpus_per_node is None else gpus_per_node
    found = _judge_declared(declared, nodes, gpus)
    if not any(one.severity == ERROR for one in found):
        found += _look_at_nodes(nodes, gpus, folder=folder, python=python)
    order = (ERROR, WARNING, INFO)
    return sorted(found, key=lambda one: order.index(one.severity))


def _declared() -> list[_Declared] | Checked:
    """Return the nodes of the default partition, or of all where there is none; or why Slurm does not say."""
    asked = _run(["sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%G"])
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else f"code {asked.returncode}"
        return _error("controller", "sinfo does not answer", why, "ask whoever runs the cluster: slurmctld is away")
    rows = [line.split("|") for line in asked.stdout.splitlines() if line.count("|") == 3]
    ours = [row for row in rows if row[1].endswith("*")] or rows
    return [
        _Declared(name=name, state=state.rstrip("*~#!%$@^-").lower(), gpus=_gpus_of(gres))
        for name, _, state, gres in ours
    ]


def _gpus_of(gres: str) -> int:
    """Return the GPUs in `gpu:h100:8(S:0-1),shard:4`."""
    return sum(int(number or 1) for number in re.findall(r"\bgpu(?::[\w.-]*[A-Za-z_][\w.-]*)?(?::(\d+))?", gres))


def _judge_declared(declared: Sequence[_Declared], nodes: int, gpus: int) -> list[Checked]:
    able = [one for one in declared if one.gpus >= gpus]
    usable = [one for one in able if one.state in USABLE]
    what = f"nodes of the default partition with {gpus} GPUs" if gpus else "nodes of the default partition"
    if len(able) < nodes:
        most = max((one.gpus for one in declared), default=0)
        why = f"Slurm declares {len(declared)} nodes, at most {most} GPUs each"
        remedy = "--gpus-per-node, --nodes, or GresTypes=gpu in slurm.conf and the devices in gres.conf"
        return [_error("gpus", f"{len(able)} {what}, {nodes} are needed", why, remedy)]
    if len(usable) < nodes:
        states = ", ".join(f"{one.name} is {one.state}" for one in able if one.state not in USABLE)
        remedy = "scontrol show node NAME says why; fewer with --nodes"
        return [_error("nodes", f"{len(usable)} {what} are up, {nodes} are needed", states, remedy)]
    return [Checked(code="nodes", severity=INFO, what=f"{len(usable)} {what} are up, {nodes} are needed")]


def _look_at_nodes(nodes: int, gpus: int, *, folder: Path, python: str) -> list[Checked]:
    """Run the check on nodes that are free now."""
    token = folder / f".meshwright-{secrets.token_hex(8)}"
    codec.write_text(token, "\n")
    names = "$(scontrol show hostnames $SLURM_JOB_NODELIST | paste -sd, -)"
    options = ["--job-name=meshwright-doctor", f"--nodes={nodes}", "--ntasks-per-node=1", "--time=2", "--quiet"]
    options += [f"--immediate={NODES_FREE_S}", *([f"--gpus-per-node={gpus}"] if gpus else [])]
    # The names are known inside the job alone, to a shell whose script is fixed and whose words are arguments.
    script = f'exec "$0" -m {NODE_CHECK} --names="{names}" --file="$1" --port={PORT}'
    try:
        asked = _run(["srun", *options, "sh", "-c", script, python, str(token)], limit_s=CHECK_S)
    except subprocess.TimeoutExpired:
        return [_error("job", f"a job of {nodes} nodes did not end within {CHECK_S:.0f} s", "", "squeue says why")]
    finally:
        token.unlink(missing_ok=True)
    answers = [found for line in asked.stdout.splitlines() if (found := _answer(line)) is not None]
    said = asked.stderr.strip().splitlines()
    if not answers and re.search(r"immediate|temporarily|busy", asked.stderr, re.IGNORECASE):
        why = "what is on them was not looked at"
        return [
            Checked(code="busy", severity=WARNING, what=f"{nodes} nodes are not free now", why=why, remedy="ask again")
        ]
    if not answers:
        remedy = f"{python} with meshwright and torch must start on every node: activate its environment before"
        return [_error("python", "the check did not run on any node", said[0] if said else "", remedy)]
    return judge_nodes(answers, nodes, gpus)


def _answer(line: str) -> JsonObject | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "node" in found else None


def judge_nodes(answers: Sequence[Mapping[str, Any]], nodes: int, gpus: int) -> list[Checked]:
    """Return what the answers of nodes say."""
    found: list[Checked] = []
    names = [str(one["node"]) for one in answers]
    if len(answers) < nodes:
        absent = ", ".join(sorted({name for one in answers for name in one["resolved"]} - set(names)))
        found.append(
            _error("answers", f"{len(answers)} of {nodes} nodes answered", f"{absent} did not", "see its slurmd")
        )
    blind = [str(one["node"]) for one in answers if not one["sees_file"]]
    if blind:
        remedy = "write --out to a file system that all nodes mount"
        found.append(_error("folder", f"this folder is not seen on {', '.join(blind)}", "", remedy))
    by_node = {str(one["node"]): {k: v for k, v in one["versions"].items() if k != "python"} for one in answers}
    without = [name for name, has in by_node.items() if "torch" not in has]
    if without:
        remedy = "install torch there, or activate an environment that all nodes see before asking"
        found.append(_error("torch", f"torch is not found on {', '.join(without)}", "", remedy))
    for name in sorted({name for has in by_node.values() for name in has}):
        given = {node: has.get(name, "absent") for node, has in by_node.items()}
        if len(set(given.values())) > 1:
            why = ", ".join(f"{version} on {node}" for node, version in given.items())
            found.append(_error("versions", f"{name} differs", why, "install the same on all nodes"))
    found += _names_and_ports(answers)
    few = [str(one["node"]) for one in answers if one["gpu_devices"] < gpus]
    if few:
        why = f"a job asks for {gpus} a node, and there are fewer /dev/nvidia0, 1, ..."
        remedy = "gres.conf must name the devices of GPUs; the driver must be loaded"
        found.append(_error("devices", f"GPUs are missing on {', '.join(few)}", why, remedy))
    if not any(one.severity == ERROR for one in found):
        found.append(Checked(code="software", severity=INFO, what=f"{', '.join(names)} have the same software"))
    return found


def _names_and_ports(answers: Sequence[Mapping[str, Any]]) -> list[Checked]:
    """Return what keeps nodes from meeting: at the first node, at the port of the rendezvous."""
    found: list[Checked] = []
    first = next((name for name in answers[0]["resolved"]), None)
    hosts = {str(one["node"]): str(one["host"]) for one in answers}
    for one in answers:
        unknown = [name for name, where in one["resolved"].items() if not where]
        if unknown:
            why = f"on {one['node']} they lead to no address"
            remedy = "add the nodes to DNS or /etc/hosts on all nodes"
            found.append(_error("names", f"the names {', '.join(unknown)} are not known", why, remedy))
        where = one["resolved"].get(first, [])
        if where and all(_is_loopback(address) for address in where) and hosts.get(str(first)) != one["host"]:
            why = f"on {one['node']} it leads to {', '.join(where)}, which is {one['node']} itself"
            found.append(_error("names", f"{first} is not reached by its name", why, "correct /etc/hosts there"))
        asked = str(one["nccl_interface"])  # prefixes of names; ^: others than these
        wanted = tuple(filter(None, asked.lstrip("=").split(",")))
        if wanted and not asked.startswith("^") and not any(name.startswith(wanted) for name in one["interfaces"]):
            why = f"{one['node']} has {', '.join(one['interfaces'])}"
            remedy = "unset it, or name an interface of all nodes"
            found.append(_error("interfaces", f"NCCL_SOCKET_IFNAME is {asked}", why, remedy))
    host = next((one for one in answers if one["node"] == first), None)
    if host is not None and not host["port_free"]:
        found.append(
            _error("port", f"port {PORT} is in use on {first}", "the nodes meet there", "wait, or end what listens")
        )
    taken = {str(one["node"]): one["interfaces"][0] for one in answers if one["interfaces"]}
    if taken and not any(one["nccl_interface"] for one in answers):
        what = "NCCL will use " + ", ".join(f"{name} on {node}" for node, name in taken.items())
        found.append(Checked(code="interfaces", severity=INFO, what=what))
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _error(code: str, what: str, why: str, remedy: str) -> Checked:
    return Checked(code=code, severity=ERROR, what=what, why=why, remedy=remedy)


def _run(command: Sequence[str], limit_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except OSError as error:
        raise PlannerError(f"{command[0]} could not be run", why=str(error)) from error
