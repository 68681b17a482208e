"""All-gather and matmul with specialised warps, next to `executor.kernels.gather_matmul`: measured, not a mode.

One warp loads: it waits for the pieces of other ranks, then for room in a ring of shared-memory stages, and fills them
by TMA. One or two groups of warps multiply what has arrived and store their tiles. With two groups, each has a tile of
its own and one stores while the other multiplies ("ping-pong"). The ring is filled in the order of the tiles, and a
group begins a tile only when the other has taken all stages of the tile before: a barrier of shared memory tells odd
from even rounds of the ring, not more.

`python3 tests/bench/specialised_gather.py FORM...` checks forms (all, if none is named) on one GPU, each in a process
of its own, and prints the difference to the library's product of those that end. The stage `specialised` of
`overlap_table.py` times them.

The language is Gluon (triton 3.6), since `tl.range(..., warp_specialize=True)` compiles for Hopper into kernels that
did not end (examples/validation/overlap_gradients_2xH200.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.gpu import stream_ops
from executor.gpu import symmetric_memory as symmetric
from executor.kernels.prepared_kernel import PreparedKernel
from executor.overlap import push
from executor.overlap.fused import pieces_for, programs_on

# Renamed after triton 3.6.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
BLOCK_K, GROUP_M = gl.constexpr(64), gl.constexpr(8)
CHECK_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Groups of multiplying warps, warps and tile of one, stages of the ring, and pieces in which a tile is stored."""

    groups: int
    warps: int
    block_m: int
    block_n: int
    stages: int
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank among all, whether the right operand is stored as (N, K), and how often a flag is polled at most."""

    rank: int
    world: int
    transposed: bool
    limit: int = symmetric.POLLS


FORMS = {
    "one group, 128x256": Form(groups=1, warps=8, block_m=128, block_n=256, stages=4, stored=2),
    "one group, 128x128": Form(groups=1, warps=8, block_m=128, block_n=128, stages=5, stored=1),
    "ping-pong, 128x128": Form(groups=2, warps=4, block_m=128, block_n=128, stages=5, stored=1),
    "ping-pong, 64x256": Form(groups=2, warps=4, block_m=64, block_n=256, stages=4, stored=1),
}


@gluon.jit
def _place(tile, tiles_m, tiles_n):
    """As `executor.kernels.tiles.place_in_shard`."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    height = gl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % per_group
    return first_m + inside % height, inside // height


@gluon.jit
def _tiles(rows, columns, form: gl.constexpr):
    block_m: gl.constexpr = form.block_m
    block_n: gl.constexpr = form.block_n
    return gl.cdiv(rows, block_m), gl.cdiv(columns, block_n)


@gluon.jit
def _wait_for(flag, error, code, place: gl.constexpr):
    """Wait until the int32 at `flag` is 1, and order the bulk loads that follow after it."""
    polls = 0
    while (gl.load(flag, volatile=True) < 1) & (polls < place.limit):
        polls += 1
    if polls == place.limit:
        gl.store(error, code)
    gl.inline_asm_elementwise(
        "fence.acq_rel.sys;\n\tfence.proxy.async;\n\tmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _fill(desc, b, row, column, depth, step, ring, place: gl.constexpr, form: gl.constexpr):
    """Load all steps of one tile into the ring; return the number of the next step."""
    left, right, ready, free, _ = ring
    for k in range(0, depth, BLOCK_K):
        slot = step % form.stages
        mbarrier.wait(free.index(slot), (step // form.stages & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, desc.block_type.nbytes + b.block_type.nbytes)
        load_tile(desc, [row, k], bar, left.index(slot))
        if place.transposed:
            load_tile(b, [column, k], bar, right.index(slot))
        else:
            load_tile(b, [k, column], bar, right.index(slot))
        step += 1
    return step


@gluon.jit
def _load(descs, words, sizes, ring, place: gl.constexpr, form: gl.constexpr):
    """The loading warp: own tiles first, then those of other ranks in the order in which they arrive."""
    own, gathered, b, _ = descs
    flags, error = words
    rows, columns, depth, piece_rows, pieces = sizes
    tiles_m, tiles_n = _tiles(rows, columns, form)
    per_shard = tiles_m * tiles_n
    step = 0
    last = -1
    for tile in range(gl.program_id(0), per_shard * place.world, gl.num_programs(0)):
        m, n = _place(tile % per_shard, tiles_m, tiles_n)
        row = m * form.block_m
        if tile < per_shard:
            step = _fill(own, b, row, n * form.block_n, depth, step, ring, place, form)
        else:
            shard = (place.rank + tile // per_shard) % place.world
            piece = gl.minimum(row + form.block_m - 1, rows - 1) // piece_rows
            number = tile // per_shard * pieces + piece
            # A tile of rows may end in the next piece, and beyond the last row of a shard.
            if number != last:
                _wait_for(flags + shard * pieces + piece, error, 1 + shard, place)
            last = number
            step = _fill(gathered, b, shard * rows + row, n * form.block_n, depth, step, ring, place, form)


@gluon.jit
def _store(c, part, shard, row, column, out):
    tma.store_wait(pendings=0)  # of the part before, which lay in the same memory
    out.store(part.reshape(out.shape))
    fence_async_shared()
    store_tile(c, [shard, row, column], out)


@gluon.jit
def _multiply(number: gl.constexpr, descs, sizes, ring, place: gl.constexpr, form: gl.constexpr):
    """A multiplying group: every `groups`-th tile of this program, beginning with the `number`-th."""
    _, _, _, c = descs
    left, right, ready, free, turns = ring
    rows, columns, depth, _, _ = sizes
    tiles_m, tiles_n = _tiles(rows, columns, form)
    steps = gl.cdiv(depth, BLOCK_K)
    per_shard, programs = tiles_m * tiles_n, gl.num_programs(0)
    block_m: gl.constexpr = form.block_m
    block_n: gl.constexpr = form.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[form.warps, 1], instr_shape=[16, form.block_n, 16]
    )
    out = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    step, turn = number * steps, 0
    for tile in range(gl.program_id(0) + number * programs, per_shard * place.world, form.groups * programs):
        if form.groups == 2:  # the first tile of the first group waits for nobody
            mbarrier.wait(turns.index(number), (turn & 1) ^ (1 - number))
        acc = gl.zeros((block_m, block_n), dtype=gl.float32, layout=layout)
        for k in range(steps):
            slot = step % form.stages
            mbarrier.wait(ready.index(slot), step // form.stages & 1)
            right_tile = right.index(slot)
            if place.transposed:
                right_tile = right_tile.permute((1, 0))
            acc = warpgroup_mma(left.index(slot), right_tile, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            # The product before this one has ended: its stage is free.
            mbarrier.arrive(free.index((step + form.stages - 1) % form.stages), count=1, pred=k > 0)
            step += 1
        if form.groups == 2:
            mbarrier.arrive(turns.index(1 - number), count=1)
            turn += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index((step + form.stages - 1) % form.stages), count=1)
        step += (form.groups - 1) * steps
        m, n = _place(tile % per_shard, tiles_m, tiles_n)
        shard, row = (place.rank + tile // per_shard) % place.world, m * form.block_m
        if form.stored == 2:
            one, two = acc.to(c.dtype).reshape(block_m, 2, block_n // 2).permute(0, 2, 1).split()
            _store(c, one, shard, row, n * form.block_n, out)
            _store(c, two, shard, row, n * form.block_n + form.block_n // 2, out)
        else:
            _store(c, acc.to(c.dtype), shard, row, n * form.block_n, out)
    tma.store_wait(pendings=0)


@gluon.jit
def _first(descs, words, sizes, ring, place: gl.constexpr, form: gl.constexpr):
    _multiply(0, descs, sizes, ring, place, form)


@gluon.jit
def _second(descs, words, sizes, ring, place: gl.constexpr, form: gl.constexpr):
    _multiply(1, descs, sizes, ring, place, form)


@gluon.jit(do_not_specialize=["rows", "columns", "depth", "piece_rows", "pieces"])
def gather_matmul(
    own, gathered, b, c, flags, ticket, error, rows, columns, depth, piece_rows, pieces,
    place: gl.constexpr, form: gl.constexpr,
):  # fmt: skip
    """As `executor.kernels.gather_matmul`."""
    left = gl.allocate_shared_memory(own.dtype, [form.stages, form.block_m, BLOCK_K], own.layout)
    right = gl.allocate_shared_memory(b.dtype, [form.stages] + b.block_type.shape, b.layout)  # noqa: RUF005 - no lists
    ready = gl.allocate_shared_memory(gl.int64, [form.stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [form.stages, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    stages: gl.constexpr = form.stages
    for slot in gl.static_range(stages):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    descs, words, sizes = (own, gathered, b, c), (flags, error), (rows, columns, depth, piece_rows, pieces)
    ring = (left, right, ready, free, turns)
    if form.groups == 1:
        gl.warp_specialize([
            (_first, (descs, words, sizes, ring, place, form)),
            (_load, (descs, words, sizes, ring, place, form)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_first, (descs, words, sizes, ring, place, form)),
            (_second, (descs, words, sizes, ring, place, form)),
            (_load, (descs, words, sizes, ring, place, form)),
        ], [4, 1], [232, 40])  # fmt: skip
    if gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.atomic_xchg(ticket, 0, sem="relaxed", scope="gpu")
        for index in range(place.world * pieces):
            gl.atomic_xchg(flags + index, 0, sem="relaxed", scope="sys")


def _described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def _prepared(
    x: Tensor, gathered: Tensor, operand: Tensor, out: Tensor, words: tuple[Tensor, ...], piece: tuple[int, int],
    place: Place, form: Form,
) -> PreparedKernel:  # fmt: skip
    right = (
        _described(operand.t(), [form.block_n, BLOCK_K.value])
        if place.transposed
        else _described(operand, [BLOCK_K.value, form.block_n])
    )
    left, whole = (_described(tensor, [form.block_m, BLOCK_K.value]) for tensor in (x, gathered))
    parts = _described(
        out.view(place.world, x.shape[0], operand.shape[1]), [1, form.block_m, form.block_n // form.stored]
    )
    args = (left, whole, right, parts, *words, x.shape[0], operand.shape[1], x.shape[1], *piece, place, form)
    return PreparedKernel(gather_matmul, programs_on(x.device), args, changing=(0, 2, 3), num_warps=form.warps)


def gather(x: Tensor, operand: Tensor, group: torch.distributed.ProcessGroup, form: Form) -> Tensor:
    """Return all ranks' `x` (R, K) times `operand` (K, N), as the mode fused does, with specialised warps."""
    exchange = push.CopyGather(x, group, pieces=pieces_for(x), keep=False)
    plan, space = exchange.plan, exchange.space
    out = x.new_empty(space.world * x.shape[0], operand.shape[1])

    def prepare() -> PreparedKernel:
        words, piece = (plan.flags, space.ticket, space.error), (plan.bounds[0][1], len(plan.bounds))
        place = Place(rank=space.rank, world=space.world, transposed=not operand.is_contiguous())
        return _prepared(exchange.x, plan.gathered, operand, out, words, piece, place, form)

    kernel = exchange.cached(("specialised", x.shape, operand.shape, operand.is_contiguous(), form), prepare)
    kernel(exchange.current, exchange.x.data_ptr(), operand.data_ptr(), out.data_ptr())
    exchange.finish()
    return out


_ALONE: dict[object, PreparedKernel] = {}


def alone(x: Tensor, operand: Tensor, form: Form) -> Tensor:
    """Return x @ operand by the same kernel with nobody to wait for."""
    out = x.new_empty(x.shape[0], operand.shape[1])
    key = (x.shape, operand.shape, operand.is_contiguous(), form)
    if key not in _ALONE:
        words = tuple(torch.zeros(3, 32, dtype=torch.int32, device=x.device))
        place = Place(rank=0, world=1, transposed=not operand.is_contiguous())
        _ALONE[key] = _prepared(x, x, operand, out, words, (x.shape[0], 1), place, form)
        _ALONE[key].words = words  # the kernel knows their addresses
    _ALONE[key](stream_ops.current_stream(x.device), x.data_ptr(), operand.data_ptr(), out.data_ptr())
    return out


def check(name: str) -> float:
    """Return the largest difference to the library's product, over the largest number, of a form on one GPU."""
    worst = 0.0
    torch.manual_seed(3)
    for rows, columns, depth, transposed in ((2048, 1792, 4096, True), (1024, 3072, 576, False), (128, 256, 128, True)):
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
        shape = (columns, depth) if transposed else (depth, columns)
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        operand = weight.t() if transposed else weight
        expected = (x @ operand).float()
        for _ in range(3):
            found = alone(x, operand, FORMS[name]).float()
            worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", help="default: all")
    parser.add_argument("--here", action="store_true", help="check one form in this process")
    options = parser.parse_args()
    if options.here:
        print(json.dumps({"form": options.forms[0], "difference": check(options.forms[0])}), flush=True)
        return
    names = options.forms or list(FORMS)
    runs = [
        subprocess.Popen([sys.executable, __file__, "--here", name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in names
    ]  # fmt: skip
    end = time.monotonic() + CHECK_S
    for name, run in zip(names, runs, strict=True):
        try:
            out, err = run.communicate(timeout=max(0.1, end - time.monotonic()))
            print(out.strip() or json.dumps({"form": name, "failed": err[-1500:]}), flush=True)
        except subprocess.TimeoutExpired:
            run.kill()
            print(json.dumps({"form": name, "failed": f"did not end in {CHECK_S:.0f} s"}), flush=True)


if __name__ == "__main__":
    main()
