"""The output of `planner doctor`: text that can be pasted into an issue, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from topology.cluster import Cluster
from topology.codec import JsonObject, to_builtins
from topology.health.cost import links_in_use
from topology.health.diagnose import Health
from topology.profile.measurement import HOST, FlowSet, Measurement, gpu_index, median_or_none
from topology.units import GIB, MIB, in_gib, in_seconds

SCHEMA_VERSION = 1
SHOWN_SIZES = (MIB, 2**24, 2**28, GIB)


def health_json(
    cluster: Cluster, health: Health, measured: Measurement | None, versions: Mapping[str, str]
) -> JsonObject:
    """Return the verdict as plain data: bytes, bytes per second, seconds."""
    node = cluster.groups[0].node
    return {
        "schema_version": SCHEMA_VERSION,
        "healthy": health.healthy,
        "machine": health.machine,
        "versions": dict(versions),
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "kind": gpu.kind,
                "memory_bytes": gpu.memory_bytes,
                "nvlinks": links_in_use(node, gpu.vertex),
            }
            for gpu in node.gpus
        ],
        "items": to_builtins(health.items),
        "shared_ways_to_host": [list(group) for group in health.shared],
        "links": to_builtins(node.links),
        "measured": to_builtins(measured) if measured is not None else None,
    }


def health_text(cluster: Cluster, health: Health, measured: Measurement | None, versions: Mapping[str, str]) -> str:
    """Return the report: verdict first, then each item with its reason, cost and remedy, then what was measured."""
    node = cluster.groups[0].node
    lines = [
        f"machine: {health.machine}, {health.gpu_count} GPU{'s' if health.gpu_count != 1 else ''}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    ]
    if not node.gpus:
        lines.append("verdict: there is no GPU here to judge")
    else:
        lines.append(f"verdict: {_verdict(health)}")
    for gpu in node.gpus:
        memory = f", {in_gib(gpu.memory_bytes)}" if gpu.memory_bytes else ""
        uuid = f", {gpu.uuid}" if gpu.uuid else ""
        # Links need two GPUs to be seen: for a single GPU a count of 0 would be wrong.
        nvlinks = f", {links_in_use(node, gpu.vertex)} NVLinks in use" if len(node.gpus) > 1 else ""
        lines.append(f"  GPU {gpu.index}: {gpu.name or gpu.kind}{memory}{nvlinks}{uuid}")
    for item in health.items:
        lines += ["", f"{item.severity.value.upper()} [{item.code}] {item.what}"]
        lines += [
            f"  {word}: {text}"
            for word, text in (("why", item.why), ("cost", item.consequence), ("do", item.remedy))
            if text
        ]
    if measured is not None:
        lines += ["", *measured_lines(measured)]
    return "\n".join(lines) + "\n"


def _verdict(health: Health) -> str:
    counts = {word: sum(item.severity.value == word for item in health.items) for word in ("error", "warning", "info")}
    counted = ", ".join(f"{count} {word}{'s' if count != 1 else ''}" for word, count in counts.items() if count)
    basis = "" if health.measured else "; nothing was measured: add --measure"
    return f"{'healthy' if health.healthy else 'UNHEALTHY'} ({counted or 'nothing to report'}){basis}"


def measured_lines(measured: Measurement) -> list[str]:
    """Return the figures of a measurement as lines of text, all of them measured."""
    lines = [
        f"measured {measured.taken_at} in {measured.seconds:.0f} s"
        + ("" if measured.complete else f"; partial, {len(measured.missing)} parts missing")
    ]
    if measured.device == "cpu":
        lines.append("  on a CPU: a dry run of the code, which says nothing about a machine")
    lines += _pair_matrix(measured)
    for pattern, words in (
        ("host_to_device", "from the host, one at a time"),
        ("device_to_host", "to the host, one at a time"),
    ):
        flows = measured.host(pattern)
        if flows:
            each = ", ".join(f"GPU {gpu} {flow.bytes_per_s / 1e9:.1f}" for gpu, flow in sorted(flows.items()))
            lines.append(f"  copies {words}, GB/s: {each}")
    lines += [_set_line(flows) for flows in measured.flows if len(flows.flows) > 2]
    for sample in measured.compute:
        parts = [
            f"{rate / 1e12:.4g} {unit} {what}"
            for rate, unit, what in (
                (sample.memory_bytes_per_s, "TB/s", "memory copy (read + write)"),
                (sample.burst_flops, "TFLOP/s", f"{sample.dtype} matmul burst"),
                (sample.sustained_flops, "TFLOP/s", "sustained, all GPUs busy"),
            )
            if rate is not None
        ]
        clock = sample.during.sm_clock_hz if sample.during is not None else None
        parts += [f"{clock / 1e6:.0f} MHz under load"] if clock else []
        parts += [f"limited by {', '.join(sample.throttle)}"] if sample.throttle else []
        lines.append(f"  GPU {sample.gpu}: {', '.join(parts)}")
    return lines + _collective_lines(measured) + [f"  missing: {what}" for what in measured.missing]


def _pair_matrix(measured: Measurement) -> Iterator[str]:
    pairs = measured.pairs()
    gpus = sorted({gpu for pair in pairs for gpu in pair})
    if not gpus or len(gpus) > 16:
        return
    yield "  copies between GPUs, one at a time, GB/s (row to column; * wrong bytes):"
    yield "       " + "".join(f"{f'GPU{gpu}':>9}" for gpu in gpus)
    for a in gpus:
        cells = [
            f"{flow.bytes_per_s / 1e9:.1f}{'*' if flow.correct is False else ''}"
            if (flow := pairs.get((a, b))) is not None
            else "-"
            for b in gpus
        ]
        yield f"  {f'GPU{a}':<5}" + "".join(f"{cell:>9}" for cell in cells)


def _set_line(flows: FlowSet) -> str:
    rates = [flow.bytes_per_s / 1e9 for flow in flows.flows]
    words = flows.pattern.replace("_", " ")
    if flows.pattern == "all_to_one":
        words += f" (GPU {gpu_index(flows.flows[0].dst)})"
    if flows.pattern == "one_to_all" and flows.flows[0].src != HOST:
        words += f" (GPU {gpu_index(flows.flows[0].src)})"
    return (
        f"  {len(rates)} copies at once, {words}: {min(rates):.1f} to {max(rates):.1f} GB/s each,"
        f" {sum(rates):.0f} together"
    )


def _collective_lines(measured: Measurement) -> list[str]:
    """One line per op and group, at a few sizes; small sizes by graph launch where there is one."""
    series: dict[tuple[str, tuple[int, ...], int], dict[int, dict[str, float]]] = {}
    for group in measured.groups:
        key = (group.sample.op, group.gpus, group.alongside)
        series.setdefault(key, {}).setdefault(group.sample.nbytes, {})[group.sample.launch] = group.sample.time_s
    lines = []
    for (op, gpus, alongside), by_size in series.items():
        near = [max((size for size in by_size if size <= shown), default=0) for shown in SHOWN_SIZES]
        shown = [size for size in dict.fromkeys(near) if size]
        cells = []
        for size in shown:
            ways = by_size[size]
            best = ways.get("graph", median_or_none(ways.values()) or 0.0)
            cells.append(f"{_size(size)} {in_seconds(best)}{' (graph)' if 'graph' in ways else ''}")
        where = "" if not alongside else f" alongside {alongside} other group{'s' if alongside > 1 else ''}"
        lines.append(f"  {op} on GPUs {', '.join(map(str, gpus))}{where}: {'; '.join(cells)}")
    return lines


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 2**10:.3g} KiB"
