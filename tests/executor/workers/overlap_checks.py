"""Overlap modes against float64, and graphs against eager calls, on the GPUs at hand."""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from executor.gpu import symmetric_memory as symmetric
from executor.launch.records import Deadline, Recorder
from executor.overlap import all_reduce
from executor.verify import overlap as verify_overlap
from executor.verify.kernels import difference
from executor.verify.overlap import Shape

LONGEST_CASE_S = 45.0
LEAST_S = 5.0  # with less nothing is begun
TYPES = (torch.bfloat16, torch.float64, torch.float16, torch.float32)


def fill_with_nan(groups: Iterable[dist.ProcessGroup]) -> None:
    """Fill the data of all workspaces with NaN; a collective call, between operations."""
    for space in symmetric.workspaces():
        if space.data is not None:
            space.data.local.fill_(0xFF)  # also for flagged words: no call has the number 0xFFFFFFFF
        torch.cuda.synchronize(space.device)
    for group in groups:
        dist.barrier(group)


class Ranks:
    """What a rank needs for its part: inputs, the time left, and somewhere to write."""

    def __init__(self, out: str, seconds: float) -> None:
        self.deadline = Deadline.since_launch(seconds)
        self.rank = int(dist.get_rank())
        self.group = dist.group.WORLD
        self.world = dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.recorder = Recorder(out if self.rank == 0 else None)
        self.generator = torch.Generator(self.device).manual_seed(self.rank)

    def draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(dtype)

    def left(self, seconds: float) -> bool:
        """Say whether all ranks have so many seconds left."""
        flag = torch.tensor(self.deadline.left_s - seconds, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag > 0)


def captured(ranks: Ranks, iterations: int) -> None:
    """Replays of graphs of sums over ranks equal eager calls between them."""
    for nbytes in (2**13, 2**19, 2**22):
        x = ranks.draw(nbytes // 2)
        if not _starting(ranks, f"all_reduce of {nbytes} bytes: captured"):
            continue
        gc.collect()  # earlier graphs are garbage in cycles; collecting them during a capture would invalidate it
        replay = torch.cuda.make_graphed_callables(lambda x: all_reduce.all_reduce(x, ranks.group), (x.clone(),))
        worst = torch.zeros((), dtype=torch.float64, device=ranks.device)
        for turn in range(iterations):
            x.normal_(generator=ranks.generator)
            found = replay(x).clone()
            for _ in range(turn % 3):
                wanted = all_reduce.all_reduce(x, ranks.group)
                worst = torch.maximum(worst, difference(found, wanted.double(), wanted))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        _say(
            ranks,
            verify_overlap.OverlapVerdict(
                operation="all_reduce captured, to eager",
                mode="own",
                dtype="bfloat16",
                shape=Shape(rows=1, depth=0, columns=nbytes // 2),
                iterations=iterations,
                difference=float(worst),
                tolerance=0.0,
            ),
        )
    _ended()


def _starting(ranks: Ranks, what: str) -> bool:
    """Say what comes next, and have every rank show where it stands if a case takes too long; False without the
    time.
    """
    symmetric.check_delivered()
    if not ranks.left(LEAST_S):
        ranks.recorder.missing(what)
        return False
    ranks.recorder.write("starting", what=what, left_s=ranks.deadline.left_s)
    _watch()
    return True


def _watch() -> None:
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(LONGEST_CASE_S, exit=True)


def _ended() -> None:
    symmetric.check_delivered()
    faulthandler.cancel_dump_traceback_later()


def modes(ranks: Ranks, names: tuple[str, ...]) -> None:
    """Odd shapes, poisoned buffers; bfloat16 and float64 in all of them, the other types in the first."""
    shapes = [
        Shape(rows=512, depth=256, columns=512),
        Shape(rows=100 * ranks.world, depth=200, columns=136, weights=2),
        Shape(rows=1320 * ranks.world, depth=1096, columns=776),
        Shape(rows=4096, depth=1024, columns=2048),
        Shape(rows=4096 * ranks.world, depth=136, columns=6152),
    ]
    for operation in verify_overlap.OPERATIONS:
        for mode in names:
            if not _starting(ranks, f"{operation} {mode}: shapes"):
                continue
            for number, shape in enumerate(shapes):
                for dtype in TYPES if number == 0 else TYPES[:2]:
                    _say(
                        ranks,
                        verify_overlap.check(
                            operation,
                            mode,
                            shape,
                            ranks.group,
                            device=ranks.device,
                            dtype=dtype,
                            seed=number,
                            iterations=2,
                        ),
                    )
                    fill_with_nan([ranks.group])
    _ended()


def sums(ranks: Ranks) -> None:
    """All-reduce in each of its ways, alone and with residual and norm."""
    for mode in ("flagged", "one_shot", "two_shot"):
        if not _starting(ranks, f"all_reduce {mode}: shapes"):
            continue
        for rows, columns in ((1, 2048), (3, 4096), (37, 1544), (128, 8192), (512, 4096)):
            if mode == "flagged" and rows > 3:
                continue
            shape = Shape(rows=rows, depth=0, columns=columns)
            for dtype in TYPES if rows == 3 else TYPES[:1]:
                if mode == "flagged" and dtype == torch.float64:
                    continue  # its words are of 32 bits
                _say(ranks, verify_overlap.check(
                    "all_reduce", mode, shape, ranks.group, device=ranks.device, dtype=dtype, iterations=3
                ))  # fmt: skip
                fill_with_nan([ranks.group])
    _ended()


def many(ranks: Ranks, iterations: int) -> None:
    """Many iterations of one shape of each, with ranks delayed at random."""
    small, large = Shape(rows=1024, depth=512, columns=1024), Shape(rows=4096 * ranks.world, depth=128, columns=6144)
    long = Shape(rows=8192, depth=4096, columns=8192)  # which two ranks relay in four pieces
    for operation, mode, shape in (
        ("all_gather_matmul", "copy_engine", small), ("matmul_reduce_scatter", "copy_engine", small),
        ("matmul_reduce_scatter", "copy_engine", large), ("matmul_reduce_scatter", "copy_engine", long),
        ("all_gather_matmul", "fused", small),
        ("matmul_reduce_scatter", "fused", small), ("all_reduce", "one_shot", small), ("all_reduce", "two_shot", small),
        ("all_reduce", "flagged", Shape(rows=8, depth=0, columns=4096)),
    ):  # fmt: skip
        if not _starting(ranks, f"{operation} {mode}: many iterations"):
            continue
        _say(ranks, verify_overlap.check(
            operation, mode, shape, ranks.group, device=ranks.device, dtype=torch.bfloat16, delays=True, seed=77,
            iterations=max(1, iterations // {large: 4, long: 50}.get(shape, 1)),
        ))  # fmt: skip
    _ended()


def _say(ranks: Ranks, verdict: verify_overlap.OverlapVerdict) -> None:
    shape = verdict.shape
    _watch()  # anew for the next case
    ranks.recorder.write(
        "check",
        operation=verdict.operation,
        mode=verdict.mode,
        dtype=verdict.dtype,
        rows=shape.rows,
        depth=shape.depth,
        columns=shape.columns,
        weights=shape.weights,
        iterations=verdict.iterations,
        difference=min(verdict.difference, 1e30),
        tolerance=verdict.tolerance,
        ok=verdict.ok,
    )
    try:
        symmetric.check_delivered()
    except symmetric.SymmetricMemoryError as error:
        ranks.recorder.missing(f"{verdict.operation} {verdict.mode}: {error.what}")
