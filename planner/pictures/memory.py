"""Draw memory at its peak: one bar per pipeline rank, divided by category, with the capacity of the GPU."""

from __future__ import annotations

from planner.pictures.palette import BAD, MEMORY, colour
from planner.pictures.svg import MARGIN, Picture, legend, shortened
from simulator.config.estimate import MemoryEstimate
from topology.units import GIB, in_gib

WIDTH = 960.0
ROW = 34.0
TOP = 96.0
LABEL = 90.0
VALUE = 110.0
MOST_ROWS = 32


def stage_parts(estimate: MemoryEstimate) -> list[dict[str, float]]:
    """Return bytes by category for each pipeline rank, in the palette's order, with the allocator's unused memory on
    top as `reserved`: the rows of every chart of memory.
    """
    stages = estimate.by_stage or (estimate.by_category,)
    totals = estimate.reserved_by_stage or (estimate.reserved_bytes,)
    found = []
    for number, stage in enumerate(stages):
        names = [*(name for name in MEMORY if name in stage), *sorted(set(stage) - set(MEMORY))]
        slack = max(0.0, (totals[number] if number < len(totals) else 0.0) - sum(stage.values()))
        found.append({**{name: stage[name] for name in names if stage[name] > 0}, "reserved": slack})
    return found


def memory(estimate: MemoryEstimate, *, title: str) -> str:
    """Return the SVG of a memory estimate, in GiB. With many stages only the largest are drawn."""
    return memory_picture(estimate, title).text()


def memory_picture(estimate: MemoryEstimate, title: str) -> Picture:
    """Return the same picture as a `Picture`, which can be stacked with others."""
    stages = list(enumerate(stage_parts(estimate)))
    left_out = max(0, len(stages) - MOST_ROWS)
    if left_out:
        largest = sorted(stages, key=lambda item: -sum(item[1].values()))[:MOST_ROWS]
        stages = sorted(largest, key=lambda item: item[0])
    capacity = estimate.capacity_bytes
    about = (
        f"peak {in_gib(estimate.peak_bytes.value)} ({estimate.peak_bytes.low / GIB:.1f} to"
        f" {estimate.peak_bytes.high / GIB:.1f}) of {in_gib(capacity)} on rank {estimate.worst_rank};"
        f" {estimate.verdict}; {estimate.peak_bytes.source} numbers"
    )
    picture = Picture(WIDTH, TOP + ROW * len(stages) + 3 * MARGIN, title, about)
    picture.write(MARGIN, MARGIN + 30, about, kind="quiet")
    names = list(dict.fromkeys(name for _, stage in stages for name in stage))
    words = {"reserved": "reserved, not in use"}
    marks = [(words.get(name, name.replace("_", " ")), colour("memory", name)) for name in names]
    legend(picture, MARGIN, MARGIN + 54, marks)
    totals = [sum(stage.values()) for _, stage in stages]
    left, most = MARGIN + LABEL, max([capacity, *totals])
    scale = (WIDTH - left - VALUE - MARGIN) / most
    top = TOP + 16
    for row, ((number, stage), total) in enumerate(zip(stages, totals, strict=True)):
        y = top + ROW * row
        picture.write(left - 12, y + 20, shortened(f"pp rank {number}", LABEL), anchor="end")
        x = left
        for name, nbytes in stage.items():
            if nbytes > 0:
                note = f"{name.replace('_', ' ')}: {in_gib(nbytes, 2)}"
                picture.box(x, y + 4, nbytes * scale, ROW - 10, colour("memory", name), note)
                x += nbytes * scale
        picture.write(x + 8, y + 20, in_gib(total), kind="quiet")
    edge = left + capacity * scale
    bottom = top + ROW * len(stages)
    picture.line([(edge, top - 4), (edge, bottom)], BAD, 2.0, dashed=True, about=f"capacity {in_gib(capacity)}")
    picture.write(edge, bottom + 16, in_gib(capacity), anchor="middle")
    if left_out:
        picture.write(MARGIN, bottom + 34, f"{left_out} smaller stages are left out", kind="quiet")
    return picture
