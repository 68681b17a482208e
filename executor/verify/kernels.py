"""Check the kernels that exist only for half precision against plain float64 arithmetic.

`executor.verify.plans` compares plans in float64, but flash attention inside the ring, the grouped matmul of experts
and the fused matmuls of `executor.overlap.fused` run only in half precision. Here they are compared on the device and
in the type of the timed run. Differences are relative to the largest number of the reference. The tolerance is 2^4
units in the last place: inputs, results and intermediate factors are each rounded to the type, and sums are in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from executor.model.moe import Experts
from executor.parallel.context_parallel import MIN_CUDNN_TOKENS, RingAttention, positions

UNITS = 2.0**4


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVerdict:
    """The largest relative difference of results and gradients, over the ranks that took part."""

    name: str
    dtype: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


def check_ring(
    group: dist.ProcessGroup, *, device: torch.device, dtype: torch.dtype, method: str = "ring"
) -> KernelVerdict:
    """Compare attention in a ring with attention over the whole sequence; a collective call over `group`."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    length = 2 * MIN_CUDNN_TOKENS * world  # parts long enough for the fastest kernels
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 64), (2, 2, length, 64), (2, 2, length, 64), (2, 4, length, 64))
    whole = [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]
    q, k, v = (t.double().requires_grad_() for t in whole[:3])
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected.backward(whole[3].double())

    own_positions = positions(length, rank, world, device)
    parts = [t[:, :, own_positions].detach().requires_grad_() for t in whole[:3]]
    found = RingAttention(group, method, width=64, dtype=dtype, device=device)(*parts)
    found.backward(whole[3][:, :, own_positions])
    pairs = [(found, expected), *zip((p.grad for p in parts), map(_gradient, (q, k, v)), strict=True)]
    worst = torch.stack([difference(mine, theirs[:, :, own_positions], theirs) for mine, theirs in pairs]).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return _verdict("ring attention", dtype, worst)


def check_experts(*, device: torch.device, dtype: torch.dtype, autocast: bool = False) -> KernelVerdict:
    """Compare the experts on sorted tokens (one grouped kernel where it exists) with one expert after another.

    `autocast`: weights and tokens are float32, and autocast runs matmuls in `dtype`.
    """
    generator = torch.Generator().manual_seed(0)
    wide = Experts(64, 128, 4).to(device=device, dtype=torch.float64)
    for parameter in wide.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) / 8  # keeps products close to one
        parameter.data = drawn.to(device=device, dtype=dtype).double()
    kept = torch.float32 if autocast else dtype
    narrow = Experts(64, 128, 4).to(device=device, dtype=kept)
    narrow.load_state_dict(wide.state_dict())
    counts = torch.tensor([24, 0, 8, 32], device=device)
    tokens = torch.randn((64, 64), generator=generator).to(device=device, dtype=dtype)
    sent, exact = tokens.to(kept).detach().requires_grad_(), tokens.double().requires_grad_()
    with torch.autocast(device.type, dtype=dtype, enabled=autocast):
        found = narrow(sent, counts)
    expected = wide(exact, counts)
    grad = torch.randn((64, 64), generator=generator).to(device=device, dtype=dtype)
    found.backward(grad)
    expected.backward(grad.double())
    pairs = [(found, expected), (sent.grad, _gradient(exact))]
    pairs += [(a.grad, _gradient(b)) for a, b in zip(narrow.parameters(), wide.parameters(), strict=True)]
    worst = torch.stack([difference(mine, theirs, theirs) for mine, theirs in pairs]).max()
    return _verdict("experts", dtype, worst)


def _gradient(reference: Tensor) -> Tensor:
    if reference.grad is None:
        raise ValueError("the reference has no gradient")
    return reference.grad


def difference(mine: Tensor | None, theirs: Tensor, whole: Tensor) -> Tensor:
    """Return the largest difference over the largest number of `whole`; infinite for NaN and for other shapes."""
    if mine is None or mine.shape != theirs.shape:
        return torch.tensor(torch.inf, dtype=torch.float64, device=theirs.device)
    gap = (mine.detach().double() - theirs.detach()).abs().max() / whole.detach().abs().max()
    return gap.nan_to_num(torch.inf, torch.inf, torch.inf)


def _verdict(name: str, dtype: torch.dtype, worst: Tensor) -> KernelVerdict:
    return KernelVerdict(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        difference=float(worst),
        tolerance=UNITS * torch.finfo(dtype).eps,
    )
