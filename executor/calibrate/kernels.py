"""The operators that calibration can time, as torch calls by kind, name, shape and direction.

Every function here returns a call without arguments that runs the operator once on its own tensors. Names and axes are
those of the runtime descriptions (`simulator/runtimes/*.toml`). Backward calls run autograd on a retained graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from executor.model.vocabulary_loss import VocabularyLoss
from simulator.calibration.items import OperatorItem
from simulator.config.runtime import TF32

Call = Callable[[], object]
Shape = Mapping[str, int]

ROPE_BASE = 500_000.0


class Unsupported(ValueError):
    """An operator that is unknown here or cannot run on the device."""


def operator_call(device: torch.device, item: OperatorItem) -> Call:
    """Return the call. Raises Unsupported."""
    shape, direction = item.shape, item.direction
    torch_dtype = torch.float32 if item.dtype == TF32 else getattr(torch, item.dtype, None)
    if torch_dtype is None:
        raise Unsupported(f"torch has no type {item.dtype}")
    make = _TensorFactory(device, torch_dtype)
    if item.kind == "matmul":
        return _matmul(make, shape, direction)
    if item.kind == "attention":
        return _attention(make, shape, direction)
    build = _MEMORY_OPERATORS.get(item.name)
    if build is None:
        raise Unsupported(f"no operator called {item.name}")
    forward, inputs = build(make, shape)
    return _in_direction(forward, inputs, "forward" if item.name in _SAME_BACKWARD else direction)


class _TensorFactory:
    """Creates random tensors on the device: kernels on zeros draw less power and so run faster than on data."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *size: int, dtype: torch.dtype | None = None, grad: bool = False) -> Tensor:
        made = torch.randn(*size, device=self.device, dtype=dtype or self.dtype)
        return made.requires_grad_() if grad else made


def _in_direction(forward: Call, inputs: list[Tensor], direction: str) -> Call:
    if direction == "forward":

        def run() -> object:
            with torch.no_grad():
                return forward()

        return run
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not wanted:
        raise Unsupported("nothing here has a gradient")
    result = forward()
    results = [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, Tensor)]
    gradients = [torch.randn_like(out) if out.dim() else None for out in results]
    return lambda: torch.autograd.grad(results, wanted, gradients, retain_graph=True)


def _matmul(make: _TensorFactory, shape: Shape, direction: str) -> Call:
    """Return one of the three matmuls of a linear layer, which differ in memory layout; `m n k` are those of the
    matmul.
    """
    m, n, k, batch = shape["m"], shape["n"], shape["k"], shape.get("batch", 1)
    if batch > 1:
        left, right = make(batch, m, k), make(batch, k, n)
        out = torch.empty(batch, m, n, device=make.device, dtype=make.dtype)
        return lambda: torch.bmm(left, right, out=out)
    out = torch.empty(m, n, device=make.device, dtype=make.dtype)
    if direction == "forward":  # x (m, k) by a weight stored (n, k)
        left, right = make(m, k), make(n, k).t()
    elif direction == "dgrad":  # gradient (m, k) by a weight stored (k, n)
        left, right = make(m, k), make(k, n)
    else:  # wgrad: gradient of the weight (n, m) from x stored (k, m) and dy stored (k, n)
        x, dy = make(k, m), make(k, n)
        out = torch.empty(n, m, device=make.device, dtype=make.dtype)
        return lambda: torch.mm(dy.t(), x, out=out)
    return lambda: torch.mm(left, right, out=out)


def _attention(make: _TensorFactory, shape: Shape, direction: str) -> Call:
    b, a, kv, s, keys, d = (shape[axis] for axis in ("b", "a", "kv", "s", "S", "d"))
    grad = direction == "backward"
    # Stored as by the projections, tokens before heads: the kernels read strides, not a copy.
    q = make(b, s, a, d).transpose(1, 2)
    k, v = (make(b, keys, kv, d).transpose(1, 2) for _ in range(2))
    if grad:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    causal = s == keys
    backends = torch.nn.attention.SDPBackend
    order = [backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION, backends.MATH]

    def forward() -> Tensor:
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=a != kv)

    return _in_direction(forward, [q, k, v], direction)


# --- kernels that move memory ---------------------------------------------------------------------------------------


def _rms_norm(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    x, w = make(1, shape["u"], shape["h"], grad=True), make(shape["h"], grad=True)
    return lambda: torch.nn.functional.rms_norm(x, (shape["h"],), w, 1e-5), [x, w]


def _rotary_complex(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """Rotate pairs as complex numbers in float32 (torchtitan's Llama)."""
    d = shape["d"]
    q, k = (make(1, shape["t"], shape[axis] // d, d, grad=True) for axis in ("q", "kv"))
    angles = torch.outer(
        torch.arange(shape["t"], device=make.device).float(), ROPE_BASE ** -torch.rand(d // 2, device=make.device)
    )
    turn = torch.polar(torch.ones_like(angles), angles).view(1, shape["t"], 1, d // 2)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(3).type_as(x)

    return lambda: (rotate(q), rotate(k)), [q, k]


def _rotary_halves(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """Rotate halves with cosine and sine tables in float32 (our own decoder)."""
    d = shape["d"]
    q, k = (make(1, shape["t"], shape[axis] // d, d, grad=True) for axis in ("q", "kv"))
    angles = torch.rand(shape["t"], 1, d, device=make.device)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        wide = x.to(cos.dtype)
        first, second = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return lambda: (rotate(q), rotate(k)), [q, k]


def _silu(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    x = make(1, shape["t"], shape["f"], grad=True)
    return lambda: torch.nn.functional.silu(x), [x]


def _gate(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    x, y = make(1, shape["t"], shape["f"], grad=True), make(1, shape["t"], shape["f"], grad=True)
    return lambda: x * y, [x, y]


def _residual(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    x, y = make(1, shape["u"], shape["h"]), make(1, shape["u"], shape["h"])
    return lambda: x + y, [x, y]


def _embedding(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    table = make(shape["v"], shape["h"], grad=True)
    ids = torch.randint(shape["v"], (1, shape["t"]), device=make.device)
    return lambda: torch.nn.functional.embedding(ids, table), [table]


def _cross_entropy(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """Logits to float32, log-softmax and the negative log-likelihood: the loss from a head's output."""
    logits = make(shape["t"], shape["v"], grad=True)
    labels = torch.randint(shape["v"], (shape["t"],), device=make.device)
    return lambda: torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum"), [logits]


def _loss_in_parts(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """The executor's own eager loss, which processes the logits in groups of tokens."""
    logits = make(shape["t"], shape["v"], grad=True)
    labels = torch.randint(shape["v"], (shape["t"],), device=make.device)
    loss = VocabularyLoss(shape["v"], None, compiled=False)
    return lambda: loss.of_rows(logits, labels), [logits]


def _copy(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    source = torch.zeros(shape["bytes"], dtype=torch.int8, device=make.device)
    sink = torch.empty_like(source)
    return lambda: sink.copy_(source), [source]


def _cast(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """float32 to the compute type, as for autocast and sharded parameters."""
    source = torch.zeros(shape["elements"], dtype=torch.float32, device=make.device)
    sink = torch.empty(shape["elements"], dtype=make.dtype, device=make.device)
    return lambda: sink.copy_(source), [source]


def _layer_shards(make: _TensorFactory, shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Return the parameters of a decoder layer of width h, q, kv and f, as a list of flat shards."""
    h, q, kv, f = (shape[axis] for axis in ("h", "q", "kv", "f"))
    sizes = (h * q, h * kv, h * kv, q * h, h * f, h * f, f * h, h, h)
    return [torch.zeros(-(-size // shape["ranks"]), dtype=dtype, device=make.device) for size in sizes]


def _gather_pack(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """FSDP's copy-in: float32 shards cast and packed into the all-gather's buffer."""
    shards = _layer_shards(make, shape, torch.float32)
    flat = torch.empty(sum(s.numel() for s in shards), dtype=make.dtype, device=make.device)
    views = list(flat.split([s.numel() for s in shards]))
    return lambda: torch._foreach_copy_(views, shards), []


def _gather_unpack(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """FSDP's copy-out: the gathered buffer split into whole parameters."""
    shards, ranks = _layer_shards(make, shape, make.dtype), shape["ranks"]
    sizes = [s.numel() for s in shards]
    gathered = torch.zeros(ranks, sum(sizes), dtype=make.dtype, device=make.device)
    outs = [torch.empty(ranks, size, dtype=make.dtype, device=make.device) for size in sizes]
    return lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=outs), []


def _reduce_pack(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    """FSDP's reduce-scatter copy-in: whole gradients chunked by rank and cast to float32."""
    ranks = shape["ranks"]
    grads = [
        torch.zeros(s.numel() * ranks, dtype=make.dtype, device=make.device)
        for s in _layer_shards(make, shape, make.dtype)
    ]
    width = sum(-(-g.numel() // ranks) for g in grads)
    out = torch.empty(ranks, width, dtype=torch.float32, device=make.device)
    return lambda: torch._chunk_cat(grads, dim=0, num_chunks=ranks, out=out), []  # noqa: SLF001 - what FSDP2 calls


def _adamw(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    # Random numbers: on zeros the kernel takes 9.7 to 10.8 ps a parameter, not 8.1 to 8.5 (examples/profiles, H200).
    parameters = [torch.randn_like(p).requires_grad_() for p in _layer_shards(make, shape, make.dtype)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    fused = make.device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=fused or None)
    return optimizer.step, []


def _clip(make: _TensorFactory, shape: Shape) -> tuple[Call, list[Tensor]]:
    parameters = _layer_shards(make, shape, make.dtype)
    for p in parameters:
        p.grad = torch.ones_like(p)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), []


# The backward of a residual adds two gradients, with the kernel of its forward.
_SAME_BACKWARD = frozenset({"residual"})

_MEMORY_OPERATORS: dict[str, Callable[[_TensorFactory, Shape], tuple[Call, list[Tensor]]]] = {
    "rms_norm": _rms_norm,
    "rotary_complex": _rotary_complex,
    "rotary_halves": _rotary_halves,
    "silu": _silu,
    "gate": _gate,
    "residual": _residual,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "loss_in_parts": _loss_in_parts,
    "copy": _copy,
    "cast": _cast,
    "gather_pack": _gather_pack,
    "gather_unpack": _gather_unpack,
    "reduce_pack": _reduce_pack,
    "adamw": _adamw,
    "clip": _clip,
}
