"""What varies by itself where steps are timed: clocks of products after a rest, and processors among each other.

    python3 tests/bench/unsteady.py [--gpu]

Prints, for each rest, milliseconds since it: clock in GHz of products of 8192^3 by the processors' own counters
(`executor.gpu.sm_clock`); and ten times a second apart what a loop of Python takes on each processor, over the least.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SIZE, AT_ONCE, GROUPS = 8192, 8, 90
RESTS_S = (0.0, 0.02, 0.1, 0.3, 1.0)
SHOWN = (0, 3, 5, 8, 12, 26, 60, 89)  # of the groups
LOOPS, TURNS = 2000, 10


def clocks_after_rests() -> None:
    import torch

    from executor.gpu.sm_clock import SmClock

    device = torch.device("cuda", 0)
    left, right = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out, clock = torch.empty_like(left), SmClock(device)
    for rest_s in (1.0, *RESTS_S):  # the first, which compiles, is not shown
        for _ in range(900):  # a second and a half of work
            torch.mm(left, right, out=out)
        torch.cuda.synchronize(device)
        time.sleep(rest_s)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(GROUPS + 1)]
        clock.stamp()
        events[0].record()
        for event in events[1:]:
            for _ in range(AT_ONCE):
                torch.mm(left, right, out=out)
            event.record()
            clock.stamp()
        torch.cuda.synchronize(device)
        seen = clock.hertz()
        found = [f"{events[0].elapsed_time(events[at + 1]):.0f}: {(seen[at] or 0.0) / 1e9:.2f}" for at in SHOWN]
        print(f"after {rest_s:g} s of rest  {',  '.join(found)}", flush=True)


def processors() -> None:
    every = sorted(os.sched_getaffinity(0))
    turns = []
    for _ in range(TURNS):
        turns.append([])
        for one in every:
            os.sched_setaffinity(0, {one})
            turns[-1].append(min(_loop() for _ in range(3)))
        os.sched_setaffinity(0, set(every))
        time.sleep(1.0)
    least = min(map(min, turns))
    for turn in turns:
        print(" ".join(f"{seconds / least:.2f}" for seconds in turn))


def _loop() -> float:
    began, total = time.perf_counter(), 0
    for one in range(LOOPS):
        total += one * one
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="clocks as well")
    if parser.parse_args().gpu:
        clocks_after_rests()
    processors()


if __name__ == "__main__":
    main()
