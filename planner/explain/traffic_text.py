"""Bytes that GPUs send in a step, as text: a table by axis and link, and for how long the busiest NIC is busy."""

from __future__ import annotations

from planner.explain.tables import print_lines, vendor_text
from planner.explain.traffic import LINKS, NETWORK, LinkTraffic, Traffic
from planner.io.grids import console, grid
from topology.cluster import Cluster

TITLES = {"nvlink": "NVLink", "pcie": "PCIe", "network": "network"}
SHOWN = 1e-4  # share of all bytes; an axis with fewer only sums single numbers


def print_traffic(found: Traffic, cluster: Cluster) -> None:
    """Print the bytes that a GPU sends in a step, axis by axis, and what crosses each kind of link."""
    if not found.links:
        return
    used = [link.link for link in found.links]
    titles = {link: vendor_text(TITLES[link], cluster) for link in used}
    table = grid(("GB sent by a GPU", "ranks", "on a node", *titles.values()), gap=2)
    everything = sum(axis.sent_bytes for axis in found.axes)
    for axis in found.axes:
        if axis.sent_bytes >= SHOWN * everything:
            cells = (_gigabytes(getattr(axis, f"{link}_bytes")) for link in used)
            table.add_row(axis.axis, str(axis.ranks), str(axis.ranks_per_node), *cells)
    screen = console()
    screen.print(table)
    print_lines(screen, [f"{titles[link.link]:<10}{link_text(link)}" for link in found.links])


def link_text(link: LinkTraffic) -> str:
    """Return a sentence on the bytes that cross one kind of link."""
    crossing = f", {_gigabytes(link.total_bytes)} GB cross between nodes in all" if link.link == NETWORK else ""
    port = "its share of the NICs" if link.link == NETWORK else "its port"
    if not link.bytes_per_s:
        return f"{_gigabytes(link.busiest_bytes)} GB from the busiest GPU a step{crossing}"
    return (
        f"{_gigabytes(link.busiest_bytes)} GB from the busiest GPU a step: {link.busy_share:.1%} of the step at "
        f"{link.bytes_per_s / 1e9:.4g} GB/s ({port}, datasheet){crossing}"
    )


def traffic_rows(first: Traffic, second: Traffic) -> list[tuple[str, ...]]:
    """Return rows of a comparison: bytes per GPU by link, and the share of the step that they take."""
    rows: list[tuple[str, ...]] = []
    for name in LINKS:
        one, other = ({link.link: link for link in found.links}.get(name) for found in (first, second))
        if one is None and other is None:
            continue
        sent = [link.mean_bytes if link else 0.0 for link in (one, other)]
        busy = [link.busy_share if link else 0.0 for link in (one, other)]
        cells = [f"{_gigabytes(nbytes)} GB" for nbytes in sent]
        rows.append((f"sent, {TITLES[name]}", *cells, f"{(sent[1] - sent[0]) / 1e9:+.3g} GB"))
        rows.append(
            (f"{TITLES[name]} busy", *(f"{share:.1%}" for share in busy), f"{100 * (busy[1] - busy[0]):+.1f} points")
        )
    return rows


def _gigabytes(nbytes: float) -> str:
    value = nbytes / 1e9
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
