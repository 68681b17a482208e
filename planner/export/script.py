"""Compose shell scripts from words: user input is quoted by shlex, and only our own words may be shell expressions.

No command line is made by string formatting.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.export.draft import Draft
from planner.export.hosts import Hosts
from planner.export.job import ExportJob
from simulator.runtimes.environment import Variable
from topology.errors import Infeasible

MASTER_PORT = 29500  # torchrun's own default
WIDTH = 100


class ShellExpression(str):
    """A word that the shell expands, such as "$SLURM_NODEID". Never made from user input."""

    __slots__ = ()


# Set by the user on each of several hosts.
NODE_RANK_VALUE = ShellExpression('"${NODE_RANK:-0}"')
NODE_RANK = ShellExpression('"${NODE_RANK:?set it to 0 on the first host, 1 on the next}"')
MASTER_ADDRESS = ShellExpression('"${MASTER_ADDR:?set it to the address of the first host}"')


def quote_word(word: str) -> str:
    """Return a word quoted for the shell, unless it is a ShellExpression."""
    return str(word) if isinstance(word, ShellExpression) else shlex.quote(word)


def command(words: Sequence[str]) -> str:
    """Return a command, wrapped between words if it is long."""
    lines = [""]
    for word in map(quote_word, words):
        if lines[-1] and len(lines[-1]) + len(word) > WIDTH:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return " \\\n  ".join(lines)


def comment(lines: Iterable[str]) -> str:
    """Return lines as comments, with control characters escaped."""
    return "".join(f"# {_one_line(line)}\n" if line else "#\n" for line in lines)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def export_lines(variables: Iterable[Variable]) -> str:
    """Return `export` lines, each below its reason; consecutive ones with the same reason share it."""
    text, last_reason = "", ""
    for one in variables:
        text += (
            f"{'' if one.reason == last_reason else comment([one.reason])}export {one.name}={quote_word(one.value)}\n"
        )
        last_reason = one.reason
    return text


FILE_END = "END_OF_FILE"  # a line that no file of ours contains


def file_lines(files: dict[str, str]) -> str:
    """Return lines that write files into the working directory. Their names are our own."""
    return "".join(f"cat > {name} <<'{FILE_END}'\n{text.rstrip()}\n{FILE_END}\n" for name, text in files.items())


def run_line(job: ExportJob, words: Sequence[str], *, devices: str = "") -> str:
    """Return a command with the environment before it, as it is typed; `devices` are the GPUs by local rank, if any."""
    values = {one.name: one.value for one in job.environment()}
    if devices:
        values |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
    hosts = job.hosts()
    each = f"  # --node-rank 0 to {hosts.count - 1}" if "--node-rank" in words else ""
    return f"{' '.join(f'{name}={quote_word(value)}' for name, value in values.items())} {shlex.join(words)}{each}"


def started_script(job: ExportJob, words: Sequence[str], draft: Draft) -> Draft:
    """Return the draft of a script that writes its files and starts `words` under torchrun on every host."""
    hosts = job.hosts()
    lines, placed = device_lines(hosts, NODE_RANK_VALUE)
    variables = (*job.environment(), *draft.environment)
    started = command([*torchrun_words(hosts, node_rank=NODE_RANK, address=MASTER_ADDRESS), *words])
    return replace(
        draft,
        body=f"set -eu\n{export_lines(variables)}{lines}{file_lines(draft.files)}{draft.body}exec {started}\n",
        notes=(*draft.notes, *host_order_notes(hosts)),
        environment=(*draft.environment, *placed),
        files={},
    )


def torchrun_words(hosts: Hosts, *, node_rank: str, address: str) -> list[str]:
    """Return the torchrun command for `hosts`, with fixed node ranks, so that ranks start on the planned hosts.

    `node_rank` and `address` are words, which may be shell expressions; on one host torchrun finds a free port itself.
    """
    words = ["torchrun", f"--nproc-per-node={hosts.ranks_per_host}", "--max-restarts=0"]
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


PLACEMENT_REASON = "the plan places the ranks of a host on these GPUs, in this order"
BUS_ORDER_REASON = "GPUs are numbered as in nvidia-smi, which the plan uses"


def device_lines(hosts: Hosts, node_rank: str) -> tuple[str, tuple[Variable, ...]]:
    """Return the lines that put local ranks on the planned GPUs, and the variables they set; empty if not needed.

    `node_rank` is the shell expression of the host's number.
    """
    if not hosts.devices_matter:
        return "", ()
    order = Variable(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", reason=BUS_ORDER_REASON)
    listed = " or ".join(dict.fromkeys(map(_listed, hosts.devices)))
    chosen = Variable(name="CUDA_VISIBLE_DEVICES", value=listed, reason=PLACEMENT_REASON)
    if hosts.same_devices:
        return export_lines((order, chosen)), (order, chosen)
    cases = "".join(
        f"  {number}) export CUDA_VISIBLE_DEVICES={_listed(devices)} ;;\n"
        for number, devices in enumerate(hosts.devices)
    )
    text = f"{export_lines((order,))}{comment([PLACEMENT_REASON])}case {node_rank} in\n{cases}esac\n"
    return text, (order, chosen)


def common_device_list(hosts: Hosts, title: str) -> str:
    """Return the device list of all hosts, empty if none is needed. Raises Infeasible where hosts differ."""
    if not hosts.devices_matter:
        return ""
    if not hosts.same_devices:
        raise Infeasible(
            f"{title} gives every node the same environment", why="the plan places ranks differently on its hosts"
        )
    return _listed(hosts.devices[0])


def _listed(devices: Sequence[int]) -> str:
    return ",".join(map(str, devices))


def host_order_notes(hosts: Hosts) -> tuple[str, ...]:
    """Return a note on the node rank of each host, if it is not the given order."""
    if not hosts.order_matters:
        return ()
    listed = ", ".join(f"node rank {rank} is host {host}" for rank, host in enumerate(hosts.order[:64]))
    more = f", and {hosts.count - 64} more" if hosts.count > 64 else ""
    return (f"hosts in the plan's order: {listed}{more}",)
