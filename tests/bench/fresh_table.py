"""The ledger of fresh runs as tables: errors, how often the interval held, memory, by draw, runtime and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

GIB = 2**30
SOURCES = ("datasheet", "shipped", "calibrated")
SHORT_S = 0.1

Row = dict[str, Any]
Group = tuple[str, Callable[[Row], bool]]


def tables(ledger: list[Row], name: str = "") -> str:
    """Return the tables of a draw as Markdown, by default of the last."""
    name = name or ledger[-1]["draw"]
    rows = [row for row in ledger if row["draw"] == name]
    first, host = rows[0], rows[0]["host"]
    ran = measured(rows)
    counts = {
        status: sum(row["status"] == status for row in rows) for status in ("ok", "out of memory", "failed", "not run")
    }
    versions = ", ".join(f"{package} {version}" for package, version in host["versions"].items())
    began = min((row["ran_at"] for row in rows if row["status"] != "not run"), default=first["predicted_at"])
    ended = max((row["ran_at"] for row in rows if row["status"] != "not run"), default=first["predicted_at"])
    retried = sum(bool(row["measured"]["retries"]) for row in ran)
    where = (
        f"{host['gpus']} x {host['gpu']}, host {host['id']}, {host['cpus']} CPUs, driver {host['driver']}, {versions}, "
        f"Python {host['python']}. Predicted {first['predicted_at']} from commit `{first['commit']}`; run {began} to "
        f"{ended} UTC."
    )
    how_many = (
        f"{len(rows)} runs drawn: {counts['ok']} measured, {counts['out of memory']} out of memory, {counts['failed']} "
        f"failed, {counts['not run']} not run; in {retried} of those measured the allocator gave memory back and tried again."
    )
    lines = [
        f"## Draw {name}",
        "",
        where,
        "",
        "```",
        first["command"],
        first["calibration"] or "no calibration",
        "```",
        "",
        how_many,
        "",
        *summary(ran),
        "",
        *by_kind(ran),
        "",
        *by_part(ran),
        "",
        *each(rows),
    ]  # fmt: skip
    return "\n".join(lines)


def measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok" and row["measured"]]


def step_error(row: Row, source: str) -> float | None:
    found = row["predicted"].get(source, {})
    return found["step_s"] / row["measured"]["step_s"] - 1 if "step_s" in found else None


def memory_error(row: Row, source: str) -> float | None:
    found, reserved = row["predicted"].get(source, {}), row["measured"]["reserved_bytes"]
    return found["reserved_bytes"] / reserved - 1 if "reserved_bytes" in found and reserved else None


def inside(row: Row, source: str) -> bool:
    found = row["predicted"][source]
    return bool(found["step_low_s"] <= row["measured"]["step_s"] <= found["step_high_s"])


def memory_inside(row: Row, source: str) -> bool:
    found = row["predicted"][source]
    return bool(found["reserved_low_bytes"] <= row["measured"]["reserved_bytes"] <= found["reserved_high_bytes"])


HEAD = (
    "| {} | runs | step, mean | bias | worst | inside the 80% interval | memory, mean | bias | worst | inside |",
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)


def statistics(label: str, rows: list[Row], source: str) -> str:
    """Return a line: mean absolute, mean and worst error of steps and of reserved memory, and how many intervals
    held.
    """
    steps = [(error, row) for row in rows if (error := step_error(row, source)) is not None]
    memory = [(error, row) for row in rows if (error := memory_error(row, source)) is not None]
    if not steps:
        return f"| {label} | 0 | | | | | | | | |"
    cells = [label, str(len(steps))]
    for errors, holds in ((steps, inside), (memory, memory_inside)):
        if not errors:
            cells += ["", "", "", ""]
            continue
        values = [error for error, _ in errors]
        cells += [
            f"{sum(map(abs, values)) / len(values):.1%}",
            f"{sum(values) / len(values):+.1%}",
            f"{max(values, key=abs):+.1%}",
            f"{sum(holds(row, source) for _, row in errors) / len(errors):.0%}",
        ]
    return "| " + " | ".join(cells) + " |"


def summary(rows: list[Row]) -> list[str]:
    names = {"datasheet": "datasheets", "shipped": "the shipped profile", "calibrated": "the calibration on that host"}
    known = [source for source in SOURCES if any(source in row["predicted"] for row in rows)]
    return [HEAD[0].format("predicted from"), HEAD[1], *(statistics(names[source], rows, source) for source in known)]


def axis(name: str, *, alone: bool) -> Callable[[Row], bool]:
    """Return whether a row's plan has that axis, and with `alone` no other."""
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    return lambda row: (
        row["plan"][name] > 1 and not (alone and any(row["plan"][one] > 1 for one in axes if one != name))
    )


GROUPS: tuple[Group, ...] = (
    ("torchtitan", lambda row: row["runtime"]["name"] == "torchtitan"),
    ("our executor", lambda row: row["runtime"]["name"] != "torchtitan"),
    ("one GPU", lambda row: row["kind"] == "one GPU"),
    ("DDP alone", axis("dp_replicate", alone=True)),
    ("FSDP alone", axis("dp_shard", alone=True)),
    ("HSDP", lambda row: row["plan"]["dp_replicate"] > 1 and row["plan"]["dp_shard"] > 1),
    ("with tensor parallelism", axis("tp", alone=False)),
    ("with context parallelism", axis("cp", alone=False)),
    ("with a pipeline", axis("pp", alone=False)),
    ("experts", lambda row: row["model"]["moe"] is not None),
    ("latent attention", lambda row: row["model"]["latent"] is not None),
    ("eager", lambda row: not row["runtime"]["compile"]),
    ("compiled", lambda row: bool(row["runtime"]["compile"])),
    ("mixed precision", lambda row: row["types"] == "mixed"),
    ("all in bfloat16", lambda row: row["types"] == "bfloat16"),
    ("all in float32", lambda row: row["types"] == "float32"),
    ("without recomputation", lambda row: row["plan"]["recompute"] == "none"),
    ("selective recomputation", lambda row: row["plan"]["recompute"].startswith("selective")),
    ("full recomputation", lambda row: row["plan"]["recompute"] == "full"),
    (f"steps under {SHORT_S:g} s", lambda row: row["measured"]["step_s"] < SHORT_S),
    (f"steps of {SHORT_S:g} s and more", lambda row: row["measured"]["step_s"] >= SHORT_S),
)  # fmt: skip


def best(rows: list[Row]) -> str:
    """Return the source that knows most of these rows' machine."""
    return next((name for name in reversed(SOURCES) if any(name in row["predicted"] for row in rows)), SOURCES[0])


def by_kind(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    source = best(rows)
    found = [(label, [row for row in rows if holds(row)]) for label, holds in GROUPS]
    title = "kind, calibrated" if source == "calibrated" else f"kind, from {source}"
    return [HEAD[0].format(title), HEAD[1], *(statistics(label, some, source) for label, some in found if some)]


def by_part(rows: list[Row]) -> list[str]:
    """Return what each part of a step was on rank 0's GPU alongside its prediction, where no pipeline makes ranks
    differ.
    """
    rows = [row for row in rows if row["measured"].get("profiled") and row["plan"]["pp"] == 1]
    if not rows:
        return []
    source = best(rows)
    lines = [
        f"| part of a step, {source} ({len(rows)} runs without a pipeline) | measured, share of the steps | predicted, share | error, mean | bias |",
        "|---|--:|--:|--:|--:|",
    ]
    whole = sum(row["measured"]["step_s"] for row in rows)
    for label, seen, reported in PARTS:
        pairs = [
            (seen(row), reported(row["predicted"][source]["breakdown_s"]), row["measured"]["step_s"]) for row in rows
        ]
        of_step = [(there - here) / step for here, there, step in pairs]
        lines.append(
            f"| {label} | {sum(here for here, _, _ in pairs) / whole:.0%} | {sum(there for _, there, _ in pairs) / whole:.0%} "
            f"| {sum(map(abs, of_step)) / len(rows):.1%} of the step | {sum(of_step) / len(rows):+.1%} |"
        )
    return lines


def _sum(*names: str) -> Callable[[dict[str, float]], float]:
    return lambda parts: sum(parts.get(name, 0.0) for name in names)


def _profiled(name: str) -> Callable[[Row], float]:
    return lambda row: float(row["measured"]["profiled"][name])


def _idle(row: Row) -> float:
    """Return what of a timed step is left: the profiler slows the host, so its own idle time is too long."""
    seen = row["measured"]["profiled"]
    return float(row["measured"]["step_s"] - seen["computing_s"] - seen["exposed_collectives_s"])


PARTS: tuple[tuple[str, Callable[[Row], float], Callable[[dict[str, float]], float]], ...] = (
    ("kernels run", _profiled("computing_s"), _sum("compute", "recompute", "copies", "contention", "optimizer")),
    ("only collectives run", _profiled("exposed_collectives_s"), _sum("exposed_communication")),
    ("the GPU waits", _idle, _sum("host", "bubble", "allocator")),
)


def each(rows: list[Row]) -> list[str]:
    """Return a line for each run: predicted and measured, and where the GPU of rank 0 spent a step."""
    source = best(rows)
    lines = [
        "| run | runtime | what | datasheets | calibrated | inside | measured s | spread | memory predicted GiB | measured | error | computing / exposed collectives / idle, measured (predicted) |",
        "|---|---|---|--:|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        name = row["id"].rpartition("/")[2]
        head = f"| {name} | {row['runtime']['name']} | {row['words']} |"
        if not row["measured"]:
            if row["status"] != "not run":
                lines.append(f"{head} {row['status']}: {_plain(row['cause'])} | | | | | | | | |")
            continue
        found, seen = row["predicted"].get(source, {}), row["measured"]
        error, sheet = step_error(row, source), step_error(row, "datasheet")
        memory = memory_error(row, source)
        spread = (max(seen["steps_s"]) - min(seen["steps_s"])) / seen["step_s"]
        cells = (
            f"{sheet:+.1%}" if sheet is not None else "",
            f"{error:+.1%}" if error is not None else "",
            ("yes" if inside(row, source) else "no") if "step_s" in found else "",
            f"{seen['step_s']:.4f}",
            f"{spread:.0%}",
            f"{found.get('reserved_bytes', 0) / GIB:.1f}",
            f"{seen['reserved_bytes'] / GIB:.1f}" + (f" ({seen['retries']} retries)" if seen["retries"] else ""),
            f"{memory:+.1%}" if memory is not None else "",
            _parts(found, seen.get("profiled")),
        )
        lines.append(f"{head} " + " | ".join(cells) + " |")
    rest = [row["id"].rpartition("/")[2] for row in rows if row["status"] == "not run"]
    return [*lines, *(["", f"Not run, out of time: {', '.join(rest)}."] if rest else [])]


def _parts(predicted: Row, profiled: Row | None) -> str:
    """Return milliseconds of a step in which rank 0's GPU computed, only moved data, or had nothing to do."""
    if not profiled:
        return ""
    parts = predicted.get("breakdown_s", {})
    busy = sum(parts.get(name, 0.0) for name in ("compute", "recompute", "copies", "contention", "optimizer"))
    idle = sum(parts.get(name, 0.0) for name in ("host", "bubble"))
    pairs = (
        (profiled["computing_s"], busy),
        (profiled["exposed_collectives_s"], parts.get("exposed_communication", 0.0)),
        (profiled["idle_s"], idle),
    )
    return " / ".join(f"{seen * 1e3:.0f} ({reported * 1e3:.0f})" for seen, reported in pairs)


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:180]
