"""Fourier transforms: transformed dims are needed whole, the others pass through."""

from __future__ import annotations

from planner.sharding.ops.aten import AtenCall, NotKnownError, Statement, annotated, axes_but, made, whole_numbers
from planner.sharding.ops.op import Op

_OF_ONE_DIM = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
_OF_TWO_DIMS = ("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2")
_OF_ANY = ("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn")
_MOVED = ("fft_fftshift", "fft_ifftshift")


def _capture(call: AtenCall) -> list[Statement]:
    rank, after = len(call.shape(0)), call.node.shape
    at = 1 if call.name in _MOVED else 2
    default = -1 if call.name in _OF_ONE_DIM else [-2, -1] if call.name in _OF_TWO_DIMS else None
    given = call.argument(at, default)
    if given is None:
        sizes = call.argument(1) if at == 2 else None
        given = list(range(-len(sizes), 0)) if isinstance(sizes, list) else list(range(rank))
    dims = [d % rank for d in whole_numbers(given)]
    if len(after) != rank:
        raise NotKnownError
    axes = axes_but(rank, dims)
    result = [made(f"r{axis[0]}", after[d]) if d in dims else axis for d, axis in enumerate(axes)]
    return annotated(call, [(call.tensor(0), axes)], result)


OPS = (Op(aten=" ".join((*_OF_ONE_DIM, *_OF_TWO_DIMS, *_OF_ANY, *_MOVED)), capture=_capture),)
