"""Judge the answers of a job's nodes that checked themselves (`executor.launch.node_check`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.runs.schedulers.launchers import PORT, PORTS
from topology.cluster import Severity
from topology.codec import JsonObject
from topology.finding import ERROR, INFO, WARNING

NODE_CHECK = "executor.launch.node_check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One check. `severity` is error if a job would fail because of it."""

    code: str
    severity: Severity
    what: str
    why: str = ""
    remedy: str = ""


def error(code: str, what: str, why: str, remedy: str) -> Checked:
    """Return a check of severity error: a job would fail because of it."""
    return Checked(code=code, severity=ERROR, what=what, why=why, remedy=remedy)


def worst_first(found: Iterable[Checked]) -> list[Checked]:
    """Return the checks, faults first."""
    return sorted(found, key=lambda one: (ERROR, WARNING, INFO).index(one.severity))


def answers_in(text: str) -> list[JsonObject]:
    """Return the answers among the lines that a job printed."""
    return [found for line in text.splitlines() if (found := _answer(line)) is not None]


def _answer(line: str) -> JsonObject | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "node" in found else None


def judge_nodes(answers: Sequence[Mapping[str, Any]], nodes: int, gpus: int) -> list[Checked]:
    """Return the checks in the nodes' answers."""
    found: list[Checked] = []
    names = [str(one["node"]) for one in answers]
    if len(answers) < nodes:
        absent = ", ".join(sorted({name for one in answers for name in one["resolved"]} - set(names)))
        found.append(
            error("answers", f"{len(answers)} of {nodes} nodes answered", f"{absent} did not", "see its slurmd")
        )
    blind = [str(one["node"]) for one in answers if not one["sees_file"]]
    if blind:
        remedy = "write --out to a file system that all nodes mount"
        found.append(error("folder", f"this folder is not seen on {', '.join(blind)}", "", remedy))
    by_node = {str(one["node"]): {k: v for k, v in one["versions"].items() if k != "python"} for one in answers}
    without = [name for name, has in by_node.items() if "torch" not in has]
    if without:
        remedy = "install torch there, or activate an environment that all nodes see before asking"
        found.append(error("torch", f"torch is not found on {', '.join(without)}", "", remedy))
    for name in sorted({name for has in by_node.values() for name in has}):
        given = {node: has.get(name, "absent") for node, has in by_node.items()}
        if len(set(given.values())) > 1:
            why = ", ".join(f"{version} on {node}" for node, version in given.items())
            found.append(error("versions", f"{name} differs", why, "install the same on all nodes"))
    found += _names_and_ports(answers)
    few = [str(one["node"]) for one in answers if one["gpu_devices"] < gpus]
    if few:
        why = f"a job asks for {gpus} a node, and there are fewer /dev/nvidia0, 1, ..."
        remedy = "declare those that there are (gres.conf, ray start --num-gpus), and load the driver"
        found.append(error("devices", f"GPUs are missing on {', '.join(few)}", why, remedy))
    if not any(one.severity == ERROR for one in found):
        found.append(Checked(code="software", severity=INFO, what=f"{', '.join(names)} have the same software"))
    return found


def _names_and_ports(answers: Sequence[Mapping[str, Any]]) -> Iterator[Checked]:
    """Return what prevents nodes from connecting to the rendezvous on the first node."""
    first = next((name for name in answers[0]["resolved"]), None)
    hosts = {str(one["node"]): str(one["host"]) for one in answers}
    for one in answers:
        unknown = [name for name, where in one["resolved"].items() if not where]
        if unknown:
            why = f"on {one['node']} they lead to no address"
            remedy = "add the nodes to DNS or /etc/hosts on all nodes"
            yield error("names", f"the names {', '.join(unknown)} are not known", why, remedy)
        where = one["resolved"].get(first, [])
        if where and all(_is_loopback(address) for address in where) and hosts.get(str(first)) != one["host"]:
            why = f"on {one['node']} it leads to {', '.join(where)}, which is {one['node']} itself"
            yield error("names", f"{first} is not reached by its name", why, "correct /etc/hosts there")
        asked = str(one["nccl_interface"])  # prefixes of names; ^: others than these
        wanted = tuple(filter(None, asked.lstrip("=").split(",")))
        if wanted and not asked.startswith("^") and not any(name.startswith(wanted) for name in one["interfaces"]):
            why = f"{one['node']} has {', '.join(one['interfaces'])}"
            remedy = "unset it, or name an interface of all nodes"
            yield error("interfaces", f"NCCL_SOCKET_IFNAME is {asked}", why, remedy)
        if one["unreached"] and first not in unknown:
            why = f"a job meets at {first}: {one['unreached']}"
            remedy = f"open ports {PORT} to {PORT + PORTS - 1} between the nodes"
            yield error("port", f"{one['node']} does not reach {first}", why, remedy)
    host = next((one for one in answers if one["node"] == first), None)
    if host is not None and not host["port_free"]:
        what = f"a port of {PORT} to {PORT + PORTS - 1} is in use on {first}"
        yield error("port", what, "the nodes meet there", "ask again; the port differs from job to job")
    taken = {str(one["node"]): one["interfaces"][0] for one in answers if one["interfaces"]}
    if taken and not any(one["nccl_interface"] for one in answers):
        what = "NCCL will use " + ", ".join(f"{name} on {node}" for node, name in taken.items())
        yield Checked(code="interfaces", severity=INFO, what=what)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
