"""Texts that are probed, and parts of the machine found."""

from topology.probe.from_text import probe_text


def probe(*contents, gpu=None):
    return probe_text([(f"text {at}", content) for at, content in enumerate(contents)], gpu=gpu)


def node(cluster):
    return cluster.groups[0].node


def links(cluster, wanted):
    return [link for link in node(cluster).links if link.kind is wanted]
