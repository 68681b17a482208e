"""Check every overlap mode against plain float64 matmuls, on the device and in the type of the timed run.

Inputs are new in every iteration, symmetric buffers are filled with NaN before the first, and ranks are delayed at
random, so that data read before they arrived, or overwritten before they were read, show up. Differences are relative
to the largest number of the reference. Inputs are exact; partial sums are rounded once per rank that adds to them, and
results once. So in half precision, whose sums are float32, 2^4 units in the last place are allowed, as in
`executor.verify.kernels`. In wider types every addition of a sum of K products rounds as well, also in the reference:
the difference of two such sums grows with the square root of K, and exceeds sqrt(K) / 8 units in few of a million
numbers. Four times that is allowed, 2^4 units at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from executor import overlap
from executor.overlap import all_reduce as own_all_reduce
from executor.verify.kernels import difference
from simulator.config.model import Model
from simulator.config.overlap_sites import NONE, SITES, executor_name, modes_by_site
from simulator.config.plan import Plan
from simulator.config.workload import Workload

UNITS = 2.0**4
MOST_NUMBERS = 2**25  # per operand in the check of a plan's shapes: rows beyond are left out, to stay within a second
DELAY_CYCLES = 400_000  # maximum delay of a rank: a fifth of a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows of all ranks together, contraction (of this rank), columns (of this rank), and how many weights."""

    rows: int
    depth: int
    columns: int
    weights: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapVerdict:
    """The largest relative difference over ranks, iterations, results and gradients."""

    operation: str
    mode: str
    dtype: str
    shape: Shape
    iterations: int
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


def check(
    operation: str,
    mode: str,
    shape: Shape,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    dtype: torch.dtype,
    iterations: int = 1,
    seed: int = 0,
    delays: bool = False,
) -> OverlapVerdict:
    """Run an operation forward and backward; a collective call with the same result on every rank."""
    worst = torch.zeros((), dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    sleeper = torch.Generator().manual_seed(1000 * seed + dist.get_rank(group))
    for _ in range(iterations):
        case = _CASES[operation](mode, shape, group, generator, dtype)
        if delays:
            torch.cuda._sleep(int(torch.randint(DELAY_CYCLES, (), generator=sleeper)))  # noqa: SLF001
        for found, expected in case:
            worst = torch.maximum(worst, difference(found, expected, expected))
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return OverlapVerdict(
        operation=operation,
        mode=mode,
        dtype=str(dtype).removeprefix("torch."),
        shape=shape,
        iterations=iterations,
        difference=float(worst),
        tolerance=_units(shape, dtype, dist.get_world_size(group)) * torch.finfo(dtype).eps,
    )


def _units(shape: Shape, dtype: torch.dtype, world: int) -> float:
    longest = max(shape.rows, world * shape.depth, world * shape.columns)  # for the sums of results and gradients
    return UNITS if dtype.itemsize < 4 else max(UNITS, 0.5 * longest**0.5)


def planned(plan: Plan, model: Model, workload: Workload) -> tuple[tuple[str, str, Shape], ...]:
    """Return (operation, mode, shape) of each site of a plan that overlaps, in the sizes of a micro batch of the plan.

    Rows are left out where an operand would have more than MOST_NUMBERS.
    """
    tokens = plan.micro_batch_size * workload.seq_len // plan.cp
    found = []
    for site, mode in zip(SITES, modes_by_site(plan.tp_overlap), strict=True):
        width = -(-_width(site, model) // plan.tp)
        if mode == NONE or not width:
            continue
        most = MOST_NUMBERS // max(model.hidden, width) // plan.tp * plan.tp
        rows = max(plan.tp, min(tokens, most))
        if site.endswith("_in"):
            shape = Shape(rows=rows, depth=model.hidden, columns=width, weights=2)
            found.append(("all_gather_matmul", executor_name(mode), shape))
        else:
            shape = Shape(rows=rows, depth=width, columns=model.hidden)
            found.append(("matmul_reduce_scatter", executor_name(mode), shape))
    return tuple(dict.fromkeys(found))


def _width(site: str, model: Model) -> int:
    """Return the width that is sharded at a site, that of heads or of the dense feed-forward; 0 for a site that no
    block has.
    """
    if site.startswith("mlp"):
        return model.ffn if model.dense_layers else 0
    if model.latent is None:
        return model.heads * model.head_dim
    return model.heads * model.latent.v_head_dim if site == "attention_out" else 0


Comparisons = Iterator[tuple[Tensor | None, Tensor]]  # the result of a mode (None: no gradient), and the reference


def _all_gather_matmul(
    mode: str, shape: Shape, group: dist.ProcessGroup, generator: torch.Generator, dtype: torch.dtype
) -> Comparisons:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = _draw((shape.rows, shape.depth), generator, dtype)
    weights = [_draw((world, shape.columns, shape.depth), generator, dtype) for _ in range(shape.weights)]
    grads = [_draw((world, shape.rows, shape.columns), generator, dtype) for _ in range(shape.weights)]
    x = whole.chunk(world)[rank].clone().requires_grad_()
    mine = tuple(weight[rank].clone().requires_grad_() for weight in weights)
    outs = overlap.all_gather_matmul(x, mine, group, mode=mode)
    torch.autograd.backward(outs, [grad[rank] for grad in grads])
    pairs = zip(grads, weights, strict=True)
    dx = sum((grad[r].double() @ w[r].double() for grad, w in pairs for r in range(world)), start=_zero(x))
    yield x.grad, dx.chunk(world)[rank]
    for out, weight, grad in zip(outs, mine, grads, strict=True):
        yield out, whole.double() @ weight.double().t()
        yield weight.grad, grad[rank].double().t() @ whole.double()


def _zero(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=like.device)


def _matmul_reduce_scatter(
    mode: str, shape: Shape, group: dist.ProcessGroup, generator: torch.Generator, dtype: torch.dtype
) -> Comparisons:
    yield from _row_parallel(mode, shape, group, generator, dtype, scatter=True)


def _matmul_all_reduce(
    mode: str, shape: Shape, group: dist.ProcessGroup, generator: torch.Generator, dtype: torch.dtype
) -> Comparisons:
    yield from _row_parallel(mode, shape, group, generator, dtype, scatter=False)


def _row_parallel(
    mode: str, shape: Shape, group: dist.ProcessGroup, generator: torch.Generator, dtype: torch.dtype, *, scatter: bool
) -> Comparisons:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    xs = _draw((world, shape.rows, shape.depth), generator, dtype)
    weights = _draw((world, shape.columns, shape.depth), generator, dtype)
    grad = _draw((shape.rows, shape.columns), generator, dtype)
    x, weight = xs[rank].clone().requires_grad_(), weights[rank].clone().requires_grad_()
    run = overlap.matmul_reduce_scatter if scatter else overlap.matmul_all_reduce
    out = run(x, weight, group, mode=mode)
    out.backward(grad.chunk(world)[rank] if scatter else grad)
    total = sum((xs[r].double() @ weights[r].double().t() for r in range(world)), start=_zero(x))
    yield out, total.chunk(world)[rank] if scatter else total
    yield x.grad, grad.double() @ weight.double()
    yield weight.grad, grad.double().t() @ x.double()


def _all_reduce(
    mode: str, shape: Shape, group: dist.ProcessGroup, generator: torch.Generator, dtype: torch.dtype
) -> Comparisons:
    """Sums of (rows, columns), by flagged words, one exchange or two (`mode`), alone and with residual and norm."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    xs = _draw((world, shape.rows, shape.columns), generator, dtype)
    residual, weight = _draw((shape.rows, shape.columns), generator, dtype), _draw((shape.columns,), generator, dtype)
    x, total, row = xs[rank].clone(), xs.double().sum(0), shape.columns
    if mode == "flagged":
        launch = own_all_reduce.flagged(x.numel(), x.element_size())
        if launch is None:
            raise ValueError(f"flagged words do not carry {shape}")
        yield own_all_reduce.all_reduce(x, group, launch=launch), total
        yield own_all_reduce.all_reduce(x, group, out=x, launch=launch), total
        return
    yield own_all_reduce.all_reduce(x, group, launch=_shots(mode, x)), total
    normed, kept = own_all_reduce.all_reduce_rms_norm(
        x, residual, weight, group, eps=1e-5, launch=_shots(mode, x, row=row)
    )
    copy = x.clone()
    yield own_all_reduce.all_reduce(copy, group, out=copy, launch=_shots(mode, x)), total.clone()
    total += residual.double()
    yield kept, total
    yield normed, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.double()


def _shots(mode: str, x: Tensor, row: int | None = None) -> own_all_reduce.Launch:
    launch = own_all_reduce.launch_for(x.numel(), x.element_size(), 2, x.device, row=row)
    return replace(launch, shots={"one_shot": 1, "two_shot": 2}[mode])


_CASES: dict[str, Callable[..., Comparisons]] = {
    "all_gather_matmul": _all_gather_matmul,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
    "all_reduce": _all_reduce,
}
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def _draw(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Numbers that use all digits of the type: in float64 more than float32 has."""
    wide = torch.promote_types(dtype, torch.float32)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=wide).to(dtype)
