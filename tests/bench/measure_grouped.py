"""Products of experts in one kernel (torch's grouped_mm) compared with a batched matmul of the same sizes, on one GPU.

    python tests/bench/measure_grouped.py --out grouped.json

Writes a row a shape and direction with both times. Rows of an expert are either all equal or drawn as a router would
draw them from tokens that choose experts at random; the rate counts the arithmetic of the rows that are there.
"""

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn import functional

# (experts of a rank, width, width of an expert): two networks of few large experts and two of many small ones.
WIDTHS = ((8, 4096, 14336), (32, 7168, 2048), (32, 5120, 1536), (64, 2048, 768), (128, 2048, 768))
ROWS = (256, 512, 1024, 2048, 4096)
MOST_ROWS = 131072  # of all experts together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    rows = [
        row
        for experts, hidden, width in WIDTHS
        for each in ROWS
        if experts * each <= MOST_ROWS
        for drawn in (False, True)
        for row in shape(experts, each, hidden, width, drawn=drawn)
    ]
    ratios = [row["batched_s"] / row["grouped_s"] for row in rows]
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python tests/bench/measure_grouped.py",
        "median": statistics.median(ratios),
        "rows": rows,
    }
    Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    for row in rows:
        print(*(f"{value:.3g}" if isinstance(value, float) else value for value in row.values()))
    print("median of batched over grouped time", round(found["median"], 3))


def shape(experts: int, each: int, hidden: int, width: int, *, drawn: bool) -> list[dict[str, object]]:
    """Return the rows of one shape: forward, and backward to the tokens and to the weights."""
    tokens = experts * each
    counts = torch.full((experts,), each)
    if drawn:
        counts = torch.bincount(torch.randint(experts, (tokens,)), minlength=experts)
    ends = counts.cumsum(0).to("cuda", torch.int32)
    x, y = (torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16) for size in (hidden, width))
    w = torch.randn(experts, hidden, width, device="cuda", dtype=torch.bfloat16)
    cases = {
        "forward": (lambda: functional.grouped_mm(x, w, offs=ends), (x, w)),
        "tokens": (lambda: functional.grouped_mm(y, w.transpose(-2, -1), offs=ends), (y, w.transpose(-2, -1))),
        "weights": (lambda: functional.grouped_mm(x.t(), y, offs=ends), (x.t(), y)),
    }
    found = []
    for direction, (grouped, (left, right)) in cases.items():
        if direction == "weights":
            a, b = x.view(experts, each, hidden).transpose(1, 2), y.view(experts, each, width)
        else:
            a, b = left.reshape(experts, each, -1), right
        found.append(
            {
                "experts": experts,
                "rows": each,
                "hidden": hidden,
                "width": width,
                "direction": direction,
                "drawn": drawn,
                "grouped_s": timed(grouped),
                "batched_s": timed(lambda a=a, b=b: torch.bmm(a, b)),
            }
        )
    return found


def timed(call: object, repeats: int = 15) -> float:
    """Return the median seconds of a call on the device, after three that warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
