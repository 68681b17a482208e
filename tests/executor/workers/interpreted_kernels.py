"""The Triton kernels in triton's interpreter, with W ranks played one after the other on the CPU.

Programs run to their end one by one, so whatever a kernel would wait for is there before it starts: flags are preset,
shards are in place. Compared are the numbers, and with them the order and the coverage of tiles: outputs begin as NaN.
Prints one JSON line per case: what, and the largest difference from float64 arithmetic.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from executor.kernels import all_reduce, copies, decoder_rows, paged_attention
from executor.kernels.decoder_rows import rotate_pairs
from executor.kernels.gather_matmul import gather_matmul
from executor.kernels.matmul_scatter import matmul_scatter
from executor.model import rotary
from executor.overlap.fused import Tile, tiles_of
from executor.serving import operators
from executor.serving.operators import Heads, Pages

LIMIT = 3  # a wait for what is not preset ends at once, and the error word tells


def words() -> list[torch.Tensor]:
    """epoch, ticket, error."""
    return [torch.zeros(1, dtype=torch.int32) for _ in range(3)]


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers that fill the type: in float64 they have digits that float32 has not."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=wide).to(dtype)


def operand(weight: torch.Tensor, block_k: int, block_n: int, *, transposed: bool) -> TensorDescriptor:
    """`weight` is (N, K)."""
    if transposed:
        return TensorDescriptor.from_tensor(weight, [block_n, block_k])
    return TensorDescriptor.from_tensor(weight.t().contiguous(), [block_k, block_n])


def gather(
    world: int, rank: int, rows: int, depth: int, columns: int, pieces: int, *, dtype, transposed, halves
) -> float:
    m, n, k = 16, 32, 16
    whole, weight = draw(world, rows, depth, seed=1, dtype=dtype), draw(columns, depth, seed=2, dtype=dtype)
    gathered = whole.flatten(0, 1).clone()
    gathered[rank * rows : (rank + 1) * rows] = torch.nan  # the own shard is not to be read from there
    out = torch.full((world, rows, columns), torch.nan, dtype=dtype)
    _, ticket, error = words()
    piece_rows = -(-rows // pieces)
    flags = torch.ones((world, pieces), dtype=torch.int32)
    programs = 5
    gather_matmul[(programs,)](
        TensorDescriptor.from_tensor(whole[rank].contiguous(), [m, k]),
        TensorDescriptor.from_tensor(gathered, [m, k]),
        operand(weight, k, n, transposed=transposed),
        TensorDescriptor.from_tensor(out, [1, m, n // 2 if halves else n]),
        flags,
        ticket,
        error,
        rows,
        columns,
        depth,
        piece_rows,
        pieces,
        rank,
        world,
        transposed,
        m,
        n,
        k,
        2,
        halves,
        LIMIT,
        False,
    )
    assert not any(word.any() for word in (error, flags, ticket))
    return difference(out, whole.double() @ weight.double().t())


def scatter(world: int, rank: int, rows: int, depth: int, columns: int, piece_rows: int, *, dtype, transposed) -> float:
    """Rank `rank` computes; the others' parts lie in its slots; what it makes for others is compared, too."""
    m, n, k = 16, 32, 16
    x, weight = draw(world, world * rows, depth, seed=3, dtype=dtype), draw(world, columns, depth, seed=4, dtype=dtype)
    whole = [(x[r].double() @ weight[r].double().t()).unflatten(0, (world, rows)) for r in range(world)]
    slots = torch.stack([part[rank] for part in whole]).to(dtype)
    slots[rank] = torch.nan
    _, ticket, error = words()
    pieces = -(-rows // piece_rows)
    done, flags = torch.zeros((world - 1, pieces), dtype=torch.int32), torch.ones((world, pieces), dtype=torch.int32)
    parts, out = (
        torch.full((world - 1, rows, columns), torch.nan, dtype=dtype),
        torch.full((rows, columns), torch.nan, dtype=dtype),
    )
    matmul_scatter[(3,)](
        TensorDescriptor.from_tensor(x[rank], [m, k]), operand(weight[rank], k, n, transposed=transposed),
        TensorDescriptor.from_tensor(parts, [1, m, n // 2]), slots,
        TensorDescriptor.from_tensor(out, [m, n // 2]), done, flags, ticket, error,
        rows, columns // 8, depth, piece_rows, pieces, rank, world, transposed, m, n, k, 2, LIMIT, False,
    )  # fmt: skip
    assert not any(word.any() for word in (error, flags, ticket))
    bounds = [(first, min(first + piece_rows, rows)) for first in range(0, rows, piece_rows)]
    assert (done == torch.tensor(tiles_of(bounds, columns, Tile(block_m=m, block_n=n)))).all(), "a tile was not counted"
    worst = difference(out, sum(part[rank] for part in whole))
    for step in range(1, world):
        worst = max(worst, difference(parts[step - 1], whole[rank][(rank + step) % world]))
    return worst


def reduce(shots: int, world: int, rows: int, columns: int, block: int, *, norm: bool, dtype: torch.dtype) -> float:
    """All ranks, twice round: the first round delivers everybody's part, the second finds all parts in place."""
    numel = rows * columns - (0 if norm else 3)
    xs = draw(world, numel, seed=5, dtype=dtype)
    residual, weight = draw(rows * columns, seed=6, dtype=dtype), draw(columns, seed=7, dtype=dtype)
    set_numel = world * (rows + 2 * world) * columns
    slots = torch.full((world, 2, set_numel), torch.nan, dtype=dtype)
    flags = torch.full((world, 4 * world * 8), 9, dtype=torch.int32)  # as if the peers were ahead
    at = torch.tensor([slots[r].data_ptr() for r in range(world)])
    flags_at = torch.tensor([flags[r].data_ptr() for r in range(world)])
    kernel = {1: all_reduce.one_shot, 2: all_reduce.two_shot}[shots]
    worst = 0.0
    total = xs.double().sum(0)
    for turn in range(3):
        for rank in range(world):
            out, kept = torch.full((2, rows * columns), torch.nan, dtype=dtype)
            epoch, ticket, error = words()
            flags[:] = 9
            kernel[(3,)](
                xs[rank], out, residual, kept, weight, slots[rank], at, flags[rank], flags_at, epoch, ticket, error,
                numel, columns, set_numel, 1e-5, rank, world, norm, block, 8, LIMIT,
            )  # fmt: skip
            assert (int(error), int(epoch)) == (0, 1)
            if turn < 2:
                continue
            if norm:
                sums = (total + residual.double()).view(rows, columns)
                worst = max(worst, difference(kept.view(rows, columns), sums))
                sums = sums * torch.rsqrt(sums.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
                worst = max(worst, difference(out.view(rows, columns), sums))
            else:
                worst = max(worst, difference(out[:numel], total))
    return worst


def add(world: int, rank: int, dtype: torch.dtype) -> float:
    """What an exchange by copy engines adds up at its end."""
    parts = draw(world, 100, seed=8, dtype=dtype)
    own = parts[rank].clone()
    slots = parts.clone()
    slots[rank] = torch.nan  # nobody sends to itself
    copies.add_slots[(4,)](own, slots, 100, rank, world, 32)
    return difference(own, parts.double().sum(0))


def words_with_flags(world: int, numel: int, dtype: torch.dtype) -> float:
    """All ranks in three calls; a call's words are in place because every rank first runs once in vain."""
    block, stride, programs = 16, 8, -(-numel * dtype.itemsize // 64)
    inbox = torch.zeros((world, 2 * world * stride * block), dtype=torch.int64)
    at = torch.tensor([inbox[r].data_ptr() for r in range(world)])
    worst = 0.0
    for call in range(3):
        xs = draw(world, numel, seed=50 + call, dtype=dtype)
        for attempt in range(2):
            for rank in range(world):
                out, error = torch.full((numel,), torch.nan, dtype=dtype), torch.zeros(1, dtype=torch.int32)
                epochs = torch.full((stride,), call, dtype=torch.int32)
                all_reduce.flagged_words[(programs,)](
                    xs[rank],
                    out,
                    inbox[rank],
                    at,
                    epochs,
                    error,
                    numel * dtype.itemsize // 16,
                    rank,
                    world,
                    block,
                    stride,
                    LIMIT,
                )
                assert (epochs[:programs] == call + 1).all()
                if attempt == 0:
                    assert int(error) or rank == world - 1, "nobody had sent anything, and nobody was missed"
                else:
                    assert not int(error)
                    worst = max(worst, difference(out, xs.double().sum(0)))
    return worst


def rotate(shape: tuple[int, ...], *, first: bool, strided: bool, back: bool) -> float:
    """Against `executor.model.rotary` operator by operator in float64; a rotation's way back is its transpose, so by
    autograd.
    """
    x = draw(*shape, seed=9, dtype=torch.float32)
    if strided:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    positions, width = shape[0 if first else 1], shape[-1]
    angles = draw(positions, width // 2, seed=10, dtype=torch.float64)
    angles = torch.cat((angles, angles), dim=-1).view(positions, *((1, 1) if first else (1,)), width)
    out, rows = torch.full(shape, torch.nan), x.numel() // width
    rotate_pairs[(-(-rows // 4),)](
        x, out, angles.cos().float(), angles.sin().float(), rows, positions, shape[2], *x.stride()[:3],
        back, first, width // 2, 1 << (width // 2 - 1).bit_length(), 4,
    )  # fmt: skip
    exact = x.double().requires_grad_()
    transposed = rotary.rotate(exact, angles.cos(), angles.sin())
    if not back:
        return difference(out, transposed.detach())
    (slope,) = torch.autograd.grad(transposed, exact, x.double())
    return difference(out, slope)


HEADS, PAGE = Heads(queries=8, kv=2, width=16), 16


def cached(dtype: torch.dtype) -> tuple[torch.Tensor, Pages]:
    """Rows of queries, keys and values of three tokens, and a cache of nine pages."""
    keys, values = draw(2, 9, HEADS.kv, PAGE, HEADS.width, seed=11, dtype=dtype)
    return draw(3, (HEADS.queries + 2 * HEADS.kv) * HEADS.width, seed=12, dtype=dtype), Pages(keys, values)


def attend(splits: int, dtype: torch.dtype) -> float:
    """Against attention over pages that are copied together, in float64; some shares have no page."""
    qkv, pages = cached(dtype)
    tables = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 7, 8]], dtype=torch.int32)
    lengths = torch.tensor([33, 1, 64], dtype=torch.int32)
    parts, out = (
        torch.full((3, HEADS.queries, splits, HEADS.width), torch.nan),
        torch.full((3, 128), torch.nan, dtype=dtype),
    )
    maxima, sums = torch.full((2, 3, HEADS.queries, splits), torch.nan)
    paged_attention.attend_pages[(3, HEADS.kv, splits)](
        qkv, pages.keys, pages.values, tables, lengths, parts, maxima, sums, qkv.stride(0), tables.stride(0),
        HEADS.width**-0.5, HEADS.queries, 4, 16, HEADS.width, PAGE, splits, "ieee",
    )  # fmt: skip
    paged_attention.merge_shares[(3 * HEADS.queries,)](parts, maxima, sums, out, HEADS.width, splits)
    exact = Pages(pages.keys.double(), pages.values.double())
    return difference(out, operators.attend_pages(qkv.double(), exact, tables, lengths, HEADS))


def served_rows(dtype: torch.dtype) -> float:
    """The kernels over rows against torch's operators."""
    qkv, pages = cached(dtype)
    angles = draw(2, 50, HEADS.width // 2, seed=13, dtype=torch.float32).unbind()
    positions, slots = torch.tensor([3, 10, 40]), torch.tensor([17, 5, 100])
    mine, own = qkv.clone(), Pages(pages.keys.clone(), pages.values.clone())
    operators.rotate_and_store(qkv, angles, positions, slots, pages, HEADS)
    decoder_rows.rotate_and_store[(3, 2)](
        mine, *angles, positions, slots, own.keys, own.values, HEADS.queries, HEADS.kv, HEADS.width // 2, PAGE, 8
    )
    pairs = [(mine, qkv), (own.keys, pages.keys), (own.values, pages.values)]
    x, residual, weight = (*draw(2, 3, 40, seed=14, dtype=dtype).unbind(), draw(40, seed=15, dtype=dtype))
    out, total = torch.full((2, 3, 40), torch.nan, dtype=dtype).unbind()
    decoder_rows.add_norm[(3,)](x, residual, weight, out, total, 40, 1e-5, 64)
    pairs += zip((out, total), operators.add_norm(x, residual, weight, 1e-5), strict=True)
    both = draw(3, 84, seed=16, dtype=dtype)
    product = torch.full((3, 42), torch.nan, dtype=dtype)
    decoder_rows.gated[(3, 2)](both, product, 42, 32)
    pairs.append((product, operators.gated(both)))
    return max(difference(found, expected.double()) for found, expected in pairs)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    gap = (found.double() - expected).abs().max() / expected.abs().max()
    return float(gap.nan_to_num(torch.inf))


def main() -> None:
    def say(what: str, value: float) -> None:
        sys.stdout.write(json.dumps({"what": what, "difference": value}) + "\n")

    gathers = (
        (2, 0, 32, 48, 64, 2),
        (2, 1, 40, 40, 72, 1),
        (4, 2, 16, 32, 32, 1),
        (3, 1, 72, 24, 40, 3),
        (1, 0, 48, 32, 64, 1),
    )
    for number, (world, rank, rows, depth, columns, pieces) in enumerate(gathers):
        # Each type with each layout, in turn.
        for dtype, transposed in ((torch.float32, number % 2 == 0), (torch.float16, number % 2 == 1)):
            halves = not transposed
            name = f"gather W{world} r{rank} {rows}x{depth}x{columns} {dtype} transposed={transposed} halves={halves}"
            say(
                name,
                gather(world, rank, rows, depth, columns, pieces, dtype=dtype, transposed=transposed, halves=halves),
            )
    for world, rank, rows, depth, columns, piece_rows in (
        (2, 0, 64, 48, 64, 32), (2, 1, 40, 40, 72, 40), (4, 3, 16, 32, 32, 16), (3, 1, 72, 24, 40, 40),
    ):  # fmt: skip
        for transposed in (True, False):
            name = f"scatter W{world} r{rank} {rows}x{depth}x{columns} transposed={transposed}"
            say(
                name, scatter(world, rank, rows, depth, columns, piece_rows, dtype=torch.float32, transposed=transposed)
            )
    for shots in (1, 2):
        for number, (world, rows, columns, block) in enumerate(((2, 7, 16, 16), (4, 9, 24, 32), (3, 2, 16, 16))):
            for norm in (False, True) if world == 2 else (shots == world - 2,):
                dtype = (torch.float32, torch.float64)[(number + norm) % 2]  # each type with each, in turn
                say(
                    f"reduce shots={shots} W{world} {rows}x{columns} {norm} {dtype}",
                    reduce(shots, world, rows, columns, block, norm=norm, dtype=dtype),
                )
    for world, dtype, numel in (
        (2, torch.float32, 36), (2, torch.float16, 72), (3, torch.float16, 16), (4, torch.float32, 36),
    ):  # fmt: skip
        say(f"flagged words W{world} {numel} {dtype}", words_with_flags(world, numel, dtype))
    for shape, first in (((2, 5, 3, 16), False), ((5, 2, 3, 16), True), ((1, 7, 2, 12), False)):
        for strided in (False, True):
            for back in (False, True):
                say(f"rotary {shape} {first} {strided} {back}", rotate(shape, first=first, strided=strided, back=back))
    for dtype in (torch.float32, torch.float16):
        for splits in (1, 2, 8):
            say(f"paged attention over {splits} shares {dtype}", attend(splits, dtype))
        say(f"rows of a served decoder {dtype}", served_rows(dtype))
    for world, rank in ((2, 0), (3, 1), (8, 7)):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            say(f"add_slots W{world} r{rank} {dtype}", add(world, rank, dtype))


if __name__ == "__main__":
    main()
