"""Checks overlap modes on every rank: numbers against float64, long runs with delays, graphs against eager calls.

With `--share-gpu` all ranks take one GPU, and only our own modes are checked (`tests.executor.shared_gpu`). Records are
JSON lines, flushed one by one: a run that is cut short keeps what it had.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist

from executor import overlap
from executor.gpu import symmetric_memory as symmetric
from tests.executor import shared_gpu
from tests.executor.workers import overlap_checks
from tests.executor.workers.overlap_checks import Ranks

CHECKS: dict[str, Callable[[Ranks, argparse.Namespace], None]] = {  # `check` is all of them, in this order
    "check_modes": lambda ranks, options: overlap_checks.modes(ranks, options.modes),
    "check_sums": lambda ranks, _: overlap_checks.sums(ranks),
    "check_many": lambda ranks, options: overlap_checks.many(ranks, options.iterations),
    "captured": lambda ranks, options: overlap_checks.captured(ranks, options.iterations),
}


def run(options: argparse.Namespace, begun: Callable[[], Ranks], stage_of: Callable[[Ranks, str], None]) -> None:
    """Join the other ranks, run the stages of `options`, and leave in order. `stage_of` runs one that is no check."""
    if options.share_gpu:
        shared_gpu.join()
    else:
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    symmetric.POLLS = 1 << 25
    ranks = begun()
    ranks.recorder.write("modes", checked=options.modes, left_out=[m for m in overlap.MODES if m not in options.modes])
    for stage in options.stages:
        for part in CHECKS if stage == "check" else (stage,):
            if part in CHECKS:
                CHECKS[part](ranks, options)
            else:
                stage_of(ranks, part)
        ranks.recorder.write("stage", name=stage, left_s=ranks.deadline.left_s)
    symmetric.release()
    ranks.recorder.close()
    if options.share_gpu:
        dist.barrier()  # gloo aborts a rank whose neighbour leaves before its own last message has arrived
    dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """Return the options of a worker that checks."""
    made = argparse.ArgumentParser()
    made.add_argument("out")
    made.add_argument("--seconds", type=float, default=120)
    made.add_argument("--stages", type=names, default=("check",))
    made.add_argument("--iterations", type=int, default=200)
    made.add_argument("--modes", type=names, help="those to check; default: all, or those that can share a GPU")
    made.add_argument("--share-gpu", action="store_true", help="all ranks on one GPU, for checks only")
    return made


def read(
    made: argparse.ArgumentParser, given: list[str] | None = None, *, timed: Collection[str] = ()
) -> argparse.Namespace:
    """Return the options; what cannot be checked, or timed on a shared GPU, is refused."""
    options = made.parse_args(given)
    possible = shared_gpu.MODES if options.share_gpu else tuple(overlap.MODES)
    options.modes = options.modes or possible
    known = {"check", *CHECKS, *(() if options.share_gpu else timed)}
    if unknown := [name for name in options.stages if name not in known]:
        made.error(
            f"there are no stages {unknown}" + (" for ranks that take turns on a GPU" if options.share_gpu else "")
        )
    if unknown := [name for name in options.modes if name not in possible]:
        made.error(f"modes {unknown} cannot be checked here, {', '.join(possible)} can")
    return options


def names(text: str) -> tuple[str, ...]:
    """Return the words of a list with commas."""
    return tuple(name for name in text.split(",") if name)


def main() -> None:
    options = read(parser())
    run(options, lambda: Ranks(options.out, options.seconds), lambda _, stage: None)


if __name__ == "__main__":
    main()
