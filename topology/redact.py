"""Take out of texts and clusters what identifies a machine, a person or a place on its disk."""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Sequence
from dataclasses import replace

from topology.cluster import Cluster, Node

_IDENTITIES = (
    (re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), r"\1-<redacted>"),
    (re.compile(r"\b(GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]{7,}"), r"\1-<redacted>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b"), "<address>"),
    (re.compile(r"\bpid (\d+) of [^\s,;()]+"), r"pid \1 of <user>"),
    # The last part of a path says which file is meant; what is before it says where, and often whose.
    (re.compile(r"(?<![\w.:/<>~-])(?:~?/)(?:[\w.@+-]+/)+(?=[\w.@+-])"), "<path>/"),
)
COMMON_NAMES = ("root", "user", "admin", "ubuntu", "localhost")  # they identify nobody and are ordinary words


def own_names() -> tuple[str, ...]:
    """Return the names of this host and of this user, where they say anything."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = ""
    host = platform.node()
    return tuple(name for name in (host, host.partition(".")[0], user) if name.casefold() not in COMMON_NAMES)


def redact(text: str, *, names: Sequence[str] | None = None) -> str:
    """Return `text` without UUIDs, addresses, owners of processes, folders, and `names` (this host's and user's
    own).
    """
    for pattern, put in _IDENTITIES:
        text = pattern.sub(put, text)
    for name in own_names() if names is None else names:
        if len(name) > 2:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", text)
    return text


def redact_cluster(cluster: Cluster) -> Cluster:
    """Return `cluster` without what identifies its GPUs and network ports, and with redacted texts."""

    def bare(node: Node) -> Node:
        return replace(
            node,
            name=redact(node.name),
            gpus=tuple(replace(gpu, uuid=None, pci_bus_id=None) for gpu in node.gpus),
            nics=tuple(replace(nic, pci_bus_id=None) for nic in node.nics),
        )

    findings = tuple(
        replace(
            one,
            what=redact(one.what),
            why=redact(one.why),
            consequence=redact(one.consequence),
            remedy=redact(one.remedy),
        )
        for one in cluster.findings
    )
    groups = tuple(replace(group, node=bare(group.node)) for group in cluster.groups)
    return replace(cluster, name=redact(cluster.name), groups=groups, findings=findings)
