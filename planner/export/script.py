"""Shell scripts, composed of words: what a user named is quoted by shlex, what we wrote ourselves may be a variable.

No text of a user ever reaches a shell unquoted, and nothing here is formatted into a command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from planner.export.hosts import Hosts
from topology.errors import Infeasible

MASTER_PORT = 29500  # torchrun's own default
WIDTH = 100


class Raw(str):
    """A word of ours that the shell shall expand, such as "$SLURM_NODEID". Never made from anything a user said."""

    __slots__ = ()


# Where a script runs on several hosts, each is told who it is.
NODE_RANK_VALUE = Raw('"${NODE_RANK:-0}"')
NODE_RANK = Raw('"${NODE_RANK:?set it to 0 on the first host, 1 on the next}"')
MASTER_ADDRESS = Raw('"${MASTER_ADDR:?set it to the address of the first host}"')


def quoted(word: str) -> str:
    """Return a word as the shell needs it to be that word and nothing else."""
    return str(word) if isinstance(word, Raw) else shlex.quote(word)


def command(words: Sequence[str]) -> str:
    """Return a command, folded after options where it is long."""
    lines = [""]
    for word in map(quoted, words):
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return " \\\n  ".join(lines)


def comment(lines: Iterable[str]) -> str:
    """Return lines as comments; what would end a line is shown escaped."""
    return "".join(f"# {_one_line(line)}\n" if line else "#\n" for line in lines)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def exports(environment: dict[str, str], values: dict[str, str]) -> str:
    """Return `export` lines, each below the reason for it; neighbours with one reason share it."""
    text, said = "", ""
    for name, value in values.items():
        reason = environment[name]
        text += f"{'' if reason == said else comment([reason])}export {name}={quoted(value)}\n"
        said = reason
    return text


def torchrun(hosts: Hosts, *, node_rank: str, address: str) -> list[str]:
    """Return torchrun's words for `hosts`. Node ranks are given, not drawn, so that ranks land where they are planned.

    `node_rank` and `address` are words too; on one host torchrun finds a free port by itself.
    """
    words = ["torchrun", f"--nproc-per-node={hosts.ranks_each}", "--max-restarts=0"]
    if hosts.count == 1:
        return [words[0], "--standalone", *words[1:]]
    return [
        words[0],
        f"--nnodes={hosts.count}",
        *words[1:],
        "--node-rank",
        node_rank,
        "--master-addr",
        address,
        f"--master-port={MASTER_PORT}",
    ]


PLACED = "ranks of a host run on these of its GPUs, in this order, because the plan places them so"
BUS_ORDER = "GPUs are numbered as nvidia-smi numbers them, which is how the plan counts"


def device_lines(hosts: Hosts, node_rank: str) -> tuple[str, dict[str, str]]:
    """Return the lines that put local ranks on the planned GPUs, and the reason for each variable; empty if not needed.

    `node_rank` is the shell's expression for a host's number.
    """
    if not hosts.devices_matter:
        return "", {}
    reasons = {"CUDA_DEVICE_ORDER": BUS_ORDER, "CUDA_VISIBLE_DEVICES": PLACED}
    text = comment([BUS_ORDER]) + "export CUDA_DEVICE_ORDER=PCI_BUS_ID\n" + comment([PLACED])
    if hosts.same_devices:
        return f"{text}export CUDA_VISIBLE_DEVICES={_listed(hosts.devices[0])}\n", reasons
    arms = "".join(
        f"  {number}) export CUDA_VISIBLE_DEVICES={_listed(devices)} ;;\n"
        for number, devices in enumerate(hosts.devices)
    )
    return f"{text}case {node_rank} in\n{arms}esac\n", reasons


def one_device_list(hosts: Hosts, title: str) -> str:
    """Return the device list of every host, empty where none is needed. Raises Infeasible where hosts differ."""
    if not hosts.devices_matter:
        return ""
    if not hosts.same_devices:
        raise Infeasible(
            f"{title} gives every node the same environment", why="the plan places ranks differently on its hosts"
        )
    return _listed(hosts.devices[0])


def _listed(devices: Sequence[int]) -> str:
    return ",".join(map(str, devices))


def host_order(hosts: Hosts) -> tuple[str, ...]:
    """Return the sentence that says which host is which node rank, where that is not the given order."""
    if not hosts.order_matters:
        return ()
    listed = ", ".join(f"node rank {rank} is host {host}" for rank, host in enumerate(hosts.order[:64]))
    more = f", and {hosts.count - 64} more" if hosts.count > 64 else ""
    return (f"hosts in the plan's order: {listed}{more}",)
