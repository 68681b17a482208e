"""Rotary position embedding (arXiv 2104.09864): pairs (i, i + d/2) of each head are rotated by the position's angle.

On a GPU one kernel reads and writes every number once. As separate operators it takes seven passes, half of them in
float32, which is 4 to 11 % of a training step (0.013 to 0.081 s of 0.231 to 0.767, profiled on an H200). Compiled
blocks and other types use separate operators, which the compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor.kernels import on_demand as kernels
from executor.kernels.prepared_kernel import PreparedKernel

ROWS_AT_ONCE = 32
IN_ONE_PASS = frozenset({torch.bfloat16, torch.float16})

_kernels: dict[tuple[Any, ...], PreparedKernel] = {}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, S, a, d) rotated by the angles whose cosines and sines are (S, 1, d).

    With x (S, B, a, d) they are (S, 1, 1, d). Computed in the type of the angles, returned in that of x.
    """
    if x.is_cuda and x.dtype in IN_ONE_PASS and not torch.compiler.is_compiling():
        fused: Tensor = _FusedRotation.apply(x, cos, sin)
        return fused
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos + rotated * sin).to(x.dtype)


class _FusedRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_fused(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rotate_fused(grad, *ctx.saved_tensors, back=True), None, None


def rotate_fused(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Return x rotated by one kernel, or with `back` rotated by minus the angles."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    types = (x.dtype, cos.dtype, sin.dtype)  # angles in another type are read by another kernel
    aligned = [tensor.data_ptr() % 16 for tensor in (x, cos, sin)]
    key = (x.shape, x.stride(), cos.shape, types, back, x.device.index, *aligned)
    launch = _kernels.get(key)
    if launch is None:
        launch = _kernels[key] = _prepare_kernel(x, out, cos, sin, back=back)
    launch(
        torch._C._cuda_getCurrentRawStream(x.device.index),  # noqa: SLF001 - its public face makes an object each time
        x.data_ptr(),
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return out


def _prepare_kernel(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> PreparedKernel:
    *outer, heads, width = x.shape
    half = width // 2
    return PreparedKernel(
        kernels.rotate_pairs,
        -(-(x.numel() // width) // ROWS_AT_ONCE),
        (
            x,
            out,
            cos,
            sin,
            x.numel() // width,
            cos.shape[0],
            heads,
            *x.stride()[:3],
            back,
            cos.dim() > len(outer) + 1,
            half,
            1 << (half - 1).bit_length(),
            ROWS_AT_ONCE,
        ),
        changing=(0, 1, 2, 3),
    )
