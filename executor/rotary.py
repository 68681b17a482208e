"""Rotary positions (arXiv 2104.09864): the pairs (i, i + d/2) of each head are turned by the angle of the token's position.

On a GPU one kernel reads every number once and writes it once. Operator by operator the same takes seven passes, half of
them in float32, which is 4 to 11 % of a training
step (examples/validation/apply_1xH200.md). Compiled blocks and other types go operator by operator: the
compiler fuses them itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 32
IN_ONE_PASS = frozenset({torch.bfloat16, torch.float16})

_prepared: dict[tuple[Any, ...], Any] = {}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, S, a, d) turned by the angles whose cosines and sines are (S, 1, d).

    With x (S, B, a, d) they are (S, 1, 1, d). Computed in the type of the angles, returned in that of x.
    """
    if x.is_cuda and x.dtype in IN_ONE_PASS and not torch.compiler.is_compiling():
        return _Turn.apply(x, cos, sin)
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return turned(slope, *ctx.saved_tensors, back=True), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    """Return x turned, or turned back, by one kernel."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    key = (x.shape, x.stride(), x.dtype, cos.dim(), back, x.device.index, x.data_ptr() % 16)
    launch = _prepared.get(key)
    if launch is None:
        launch = _prepared[key] = _prepare(x, out, cos, sin, back=back)
    launch(
        torch._C._cuda_getCurrentRawStream(x.device.index),  # noqa: SLF001 - its public face makes an object each time
        x.data_ptr(),
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
    )
    return out


def _prepare(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Any:
    import triton  # noqa: PLC0415 - GPUs alone

    from executor.kernels.launching import Prepared  # noqa: PLC0415 - triton
    from executor.kernels.rotary import turn_pairs  # noqa: PLC0415 - triton

    *outer, heads, width = x.shape
    half = width // 2
    return Prepared(
        turn_pairs,
        triton.cdiv(x.numel() // width, ROWS_AT_ONCE),
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
            triton.next_power_of_2(half),
            ROWS_AT_ONCE,
        ),
        changing=(0, 1, 2, 3),
    )
