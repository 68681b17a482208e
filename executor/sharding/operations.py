"""The computation of a program's operator on a rank's own pieces.

Kernels are looked up by name in the table at the end, or are ATen operators that only compute values of tensors from
values of tensors. An operator gets the shapes of its piece, since a kernel knows the buffer that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from executor.model import moe, rotary
from executor.sharding import merged, routes
from executor.sharding.by_rows import OF_ROWS, by_rows, norm, softmax_of, weight_and_bias
from executor.sharding.places import DTYPES, Context
from simulator.sharded.program import Kernel, is_of_patches
from topology.errors import BadInput


def run_kernel(kernel: Kernel, values: Mapping[str, torch.Tensor], context: Context) -> torch.Tensor:
    """Return the piece that `kernel` computes from `values` by buffer. Raises BadInput for an operator not in the
    table.
    """
    if any(not one.numel() for one in values.values()) and (0 in context.shape or kernel.op in _CONVOLUTIONS):
        # nothing to compute, or a sum over no channels
        return torch.zeros(context.shape, dtype=context.dtype, device=next(iter(values.values())).device)
    args = _given(kernel.args, values)
    if kernel.op in _PLAIN:
        return _PLAIN[kernel.op](*args)
    if kernel.op in _PLACED:
        return _PLACED[kernel.op](context, *args)
    if kernel.op in _CONVOLUTIONS and not kernel.kwargs and is_of_patches(kernel, args[0].shape, args[1].shape):
        return _patches(*args[:3])
    function = _DIFFERENTIABLE.get(kernel.op) or _aten(kernel.op)
    if kernel.op in OF_ROWS:
        function = by_rows(function)
    found = function(*args, **{name: _given(value, values) for name, value in kernel.kwargs.items()})
    return found if kernel.index is None else found[kernel.index]


def _given(value: Any, values: Mapping[str, torch.Tensor]) -> Any:
    """Return arguments with the values and dtypes of buffers filled in."""
    if isinstance(value, dict):
        if "tensor" in value:
            return values[value["tensor"]]
        if "dtype" in value:
            return DTYPES[value["dtype"]]
        if "float" in value:
            return float(value["float"])
        if "complex" in value:
            return complex(value["complex"])
        return {key: _given(one, values) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_given(one, values) for one in value]
    return value


def _aten(name: str) -> Callable[..., torch.Tensor]:
    """Return an ATen operator that only computes a value. Raises BadInput for any other name."""
    parts = name.split(".")
    packet = getattr(torch.ops.aten, parts[1], None) if len(parts) == 3 and parts[0] == "aten" else None
    overload = getattr(packet, parts[2], None) if packet is not None and parts[1].isidentifier() else None
    if overload is None:
        raise BadInput(f"{name[:60]!r} is no operator of ATen", remedy="one of the captured module's")
    if not _only_computes(overload):
        raise BadInput(f"{name[:60]!r} is no operator that is run here", remedy="one of the captured module's")
    found: Callable[..., torch.Tensor] = overload
    return found


def _only_computes(overload: Any) -> bool:
    """Return whether an operator takes tensors, makes tensors of their values, and does nothing else.

    Others read tensors from files or memory, write into their operands, draw random numbers, or are internal to torch.
    """
    schema, tags = overload._schema, getattr(overload, "tags", ())  # noqa: SLF001 - torch has no public way to ask
    core = torch.Tag.pointwise in tags or torch.Tag.core in tags
    name = schema.name.removeprefix("aten::")
    draws = torch.Tag.nondeterministic_seeded in tags and name not in _WITHOUT_DROPOUT
    takes = any("Tensor" in str(one.type) for one in schema.arguments)
    gives = all(str(one.type) in {"Tensor", "List[Tensor]"} for one in schema.returns)
    return takes and gives and not (schema.is_mutable or draws) and (core or not name.startswith("_"))


def _vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:  # noqa: N803 - torch's
    """Powers of the elements of `x`; torch.vander writes them in place, and its own backward pass refuses that."""
    columns = len(x) if N is None else N
    rising: torch.Tensor = torch.linalg.vander(x, N=max(columns, 2))[:, :columns]
    return rising if increasing else rising.flip(-1)


_DIFFERENTIABLE = {"aten.vander.default": _vander}  # in the place of operators that autograd cannot differentiate
RECURRENT = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
_WITHOUT_DROPOUT = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}  # captured without it only
_CONVOLUTIONS = frozenset(("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"))


def _patches(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A convolution whose windows adjoin without overlap or gaps, computed as one product: cuDNN's kernels for it are
    many times slower.
    """
    window, images = weight.shape[2:], len(x)
    places = [size // width for size, width in zip(x.shape[2:], window, strict=True)]
    pairs = [size for pair in zip(places, window, strict=True) for size in pair]
    seen = x.reshape(images, x.shape[1], *pairs)
    across, inside = range(2, seen.ndim, 2), range(3, seen.ndim, 2)
    rows = seen.permute(0, *across, 1, *inside).reshape(images, *places, -1)
    return F.linear(rows, weight.flatten(1), bias).movedim(-1, 1)


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    width: int,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    outside: list[int],
) -> torch.Tensor:
    """A convolution of this rank's groups of channels, each of `width` channels of `x`; of one group, this
    rank's part.
    """
    groups = x.shape[1] // width or 1
    return torch.convolution(x, weight, None, stride, padding, dilation, transposed, outside, groups)


def _put_back(x: torch.Tensor, part: torch.Tensor, dim: int, *where: int | None) -> torch.Tensor:
    """A copy of `x` with `part` written at an index or a range of indices along a dim; also for complex numbers."""
    places = slice(*where) if len(where) > 1 else where[0]
    made = x.clone()
    made[(slice(None),) * (dim % x.ndim) + (places,)] = part
    return made


def _reshape(context: Context, x: torch.Tensor) -> torch.Tensor:
    return x.reshape(context.shape)


def _expand(context: Context, x: torch.Tensor) -> torch.Tensor:
    return x.expand(context.shape)


def _repeat_interleave(context: Context, x: torch.Tensor, times: int, dim: int) -> torch.Tensor:
    """Every element `times` times, or as many of these as this rank's piece of the result has."""
    before = x.shape[dim]
    return x.repeat_interleave(context.shape[dim] // before if before else times, dim)


def _repeat(context: Context, x: torch.Tensor) -> torch.Tensor:
    """A rank has as many copies as its piece of the result."""
    local = context.shape
    shape = (1,) * (len(local) - x.ndim) + tuple(x.shape)
    return x.repeat([after // before if before else 1 for after, before in zip(local, shape, strict=True)])


def _range(x: torch.Tensor, dim: int, start: int, length: int, step: int) -> torch.Tensor:
    if step == 1:
        return x.narrow(dim, start, length)
    return x.index_select(dim, torch.arange(start, start + length * step, step, device=x.device))


def _piece(x: torch.Tensor, dim: int, index: int, pieces: int) -> torch.Tensor:
    width = x.shape[dim] // pieces
    return x.narrow(dim, index * width, width)


def _bias(x: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
    return x + bias.view([-1 if d == dim else 1 for d in range(x.ndim)])


def _embedding(context: Context, weight: torch.Tensor, ids: torch.Tensor, padding: int | None = None) -> torch.Tensor:
    """Rows of this rank's part of the table; ids in other ranks' parts give zeros, so that the sum over ranks has all
    rows.

    The row `padding` gets no gradient.
    """
    if padding is not None:
        found = _embedding(context, weight, ids)
        return torch.where((ids == padding).unsqueeze(-1), found.detach(), found)
    shape, read = tuple(weight.shape), context.reads.values()
    buffer = next(b for b in read if context.place.shape(b) == shape and b.dtype not in _INTEGERS)
    if not buffer.dims[0]:
        return F.embedding(ids, weight)
    here = context.place.indices(buffer, 0).to(ids.device)
    if not len(here):
        return weight.new_zeros(*ids.shape, weight.shape[1])
    where = torch.full((buffer.shape[0],), -1, dtype=torch.long, device=ids.device)
    where[here] = torch.arange(len(here), device=ids.device)
    rows = where[ids]
    found = F.embedding(rows.clamp_min(0), weight)
    return found * (rows >= 0).unsqueeze(-1).to(found.dtype)


def _rows(context: Context, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Rows by number; negative numbers count from the end."""
    read = context.reads.values()
    whole = next(b for b in read if context.place.shape(b) == tuple(x.shape) and b.dtype not in _INTEGERS).shape[0]
    return _embedding(context, x, torch.where(numbers < 0, numbers + whole, numbers))


def _grouped_product(context: Context, x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Every row times the matrix of its group; rows of groups whose matrices are on other ranks are zero."""
    rows, matrices = (next(b for b in context.reads.values() if len(b.shape) == dims) for dims in (2, 3))
    if rows.dims[0]:  # this rank has some of the rows
        ends = torch.searchsorted(context.place.indices(rows, 0).to(ends.device), ends)
    start, stop = 0, len(x)
    if matrices.dims[0]:
        groups = context.place.indices(matrices, 0)
        first, last = (int(groups[0]), int(groups[-1])) if len(groups) else (0, -1)
        start, stop = (int(ends[at]) if at >= 0 else 0 for at in (first - 1, last))
        ends = ends[first : last + 1] - start
    if not len(weights):
        return x @ weights.sum(0)  # zeros, with a path for the gradients of both
    multiply = moe.grouped if moe.can_group(x, weights) else moe.looped
    made = multiply(x[start:stop], weights.transpose(-2, -1), ends.to(torch.int32))
    return F.pad(made, [0, 0, start, len(x) - start - len(made)])


# A dropout of zero, as -0.0, that gives programs their own cuDNN plans (`_laid_out`). torch distinguishes plans by the
# bits of this number, so a program shares none with other code of the process, whose gradients may have other strides.
OWN_PLANS = -0.0
_INTEGERS = frozenset(("i64", "i32", "i16", "i8", "u8", "bool"))


def _reduce(how: str) -> Callable[..., torch.Tensor]:
    def reduce(context: Context, x: torch.Tensor, dims: list[int], keep: bool) -> torch.Tensor:
        value = getattr(torch, how)(x, dim=tuple(dims), keepdim=keep) if dims else x
        return value.to(context.dtype)

    return reduce


def _group_norm(tensors: list[torch.Tensor], width: int, eps: float) -> torch.Tensor:
    x, *affine = tensors
    weight, bias = weight_and_bias(affine)
    return torch.group_norm(x, x.shape[1] // width, weight, bias, eps)


def _attention(context: Context, tensors: list[torch.Tensor], causal: bool, scale: float | None) -> torch.Tensor:
    """Attention of a rank's queries to all keys; a causal mask follows from the positions of its queries in the
    sequence.
    """
    q, k, v, *mask = tensors
    queries = context.out.dims[-2]
    if causal and queries:
        q_at = context.place.indices(context.out, len(context.out.shape) - 2).to(q.device)
        keys = torch.arange(k.shape[-2], device=q.device)
        mask = [q_at[:, None] >= keys[None, :], *mask]
        causal = False
    grouped = q.ndim > 2 and q.shape[-3] != k.shape[-3]
    out = F.scaled_dot_product_attention(
        q, k, v, mask[0] if mask else None, dropout_p=OWN_PLANS, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if out.requires_grad:
        out.register_hook(partial(_laid_out, strides=out.stride()))
    return out


def _laid_out(gradient: torch.Tensor, *, strides: tuple[int, ...]) -> torch.Tensor:
    """A gradient with the strides of its result.

    torch 2.11 caches cuDNN's plans of the backward pass by the layouts of queries, keys and values
    (aten/src/ATen/native/cudnn/MHA.cpp: MHACacheKeyWrapper), so it would read a gradient with other strides as if it
    had those of the first one. Nothing is copied if only the strides of dims of one element differ.
    """
    both = zip(gradient.shape, gradient.stride(), strides, strict=True)
    if all(size == 1 or ours == wanted for (size, ours, wanted) in both):
        return gradient.as_strided(gradient.shape, strides)
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


def _rotary(context: Context, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, by one kernel if it supports these shapes and the angles need no gradient."""
    width = x.shape[-1]
    shape = (1,) * (x.ndim - cos.ndim) + tuple(cos.shape)
    fits = x.ndim == 4 and context.dtype == x.dtype in rotary.IN_ONE_PASS and shape[-1] == width and x.is_cuda
    if fits and not (cos.requires_grad or sin.requires_grad):
        angles = [angle.reshape(-1, 1, width).contiguous() for angle in (cos, sin)]
        if shape[:-1] == (1, x.shape[1], 1):
            return rotary.rotate(x, *angles)
        if shape[:-1] == (1, 1, x.shape[2]):
            return rotary.rotate(x.transpose(1, 2), *angles).transpose(1, 2)
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(context.dtype)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=ignored)


def _loss_rows(
    x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, kind: str, ignored: int, smoothing: float
) -> torch.Tensor:
    """The loss of every row over all classes."""
    if kind == "nll_loss":
        return F.nll_loss(x, targets, weights, reduction="none", ignore_index=ignored)
    return F.cross_entropy(x, targets, weights, reduction="none", ignore_index=ignored, label_smoothing=smoothing)


def _loss_weights(x: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """The weight of each row in the mean of a loss: that of its target's class, zero for ignored rows."""
    counted = targets != ignored
    if weights is None:
        return counted.to(x.dtype)
    return torch.where(counted, weights[torch.where(counted, targets, 0)], 0.0)


def _not_equal(context: Context, x: torch.Tensor, value: int) -> torch.Tensor:
    return (x != value).to(context.dtype)


def _put_strided(x: torch.Tensor, part: torch.Tensor, *where: Any) -> torch.Tensor:
    """A copy of `x` with `part` in the place of a strided view. torch's own has the gradient of the other elements."""
    at = torch.arange(x.numel(), device=x.device).as_strided(*where)
    return x.reshape(-1).scatter(0, at.reshape(-1), part.reshape(-1)).view(x.shape)


def _topk(x: torch.Tensor, k: int, dim: int, index: int, largest: bool = True) -> torch.Tensor:
    return torch.topk(x, k, dim=dim, largest=largest)[index]


def _shard(context: Context, x: torch.Tensor, *parts: list[Any]) -> torch.Tensor:
    """Return this rank's part of a tensor that it has whole. A part is (dim, blocks, mesh axes)."""
    for dim, blocks, axes in parts:
        index, pieces = context.place.position(axes)
        shape = x.shape
        if shape[dim] % (blocks * pieces):
            x = x.narrow(dim, *_share(shape[dim], axes, context))
            continue
        seen = x.reshape(*shape[:dim], blocks, pieces, shape[dim] // blocks // pieces, *shape[dim + 1 :])
        part = seen.select(dim + 1, index)
        x = part.reshape(*shape[:dim], shape[dim] // pieces, *shape[dim + 1 :])
    return x


def _share(size: int, axes: list[str], context: Context) -> tuple[int, int]:
    """Return the start and the length of this rank's part of a dim that mesh axes split unevenly, one after the
    other.
    """
    start = 0
    for axis in axes:
        width = -(-size // context.place.sizes[axis])
        before = min(size, context.place.at[axis] * width)
        start, size = start + before, min(width, size - before)
    return start, size


def _unshard(context: Context, x: torch.Tensor, *parts: list[Any]) -> torch.Tensor:
    """The gradient of `_shard`: this rank's part, with zeros around it."""
    whole = context.shape
    for dim, blocks, axes in reversed(parts):
        index, pieces = context.place.position(axes)
        shape = x.shape
        if whole[dim] % (blocks * pieces):
            start, length = _share(whole[dim], axes, context)
            x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [start, whole[dim] - start - length])
            continue
        out = x.new_zeros(*shape[:dim], blocks, pieces, shape[dim] // blocks, *shape[dim + 1 :])
        out.select(dim + 1, index).copy_(x.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]))
        x = out.reshape(*shape[:dim], shape[dim] * pieces, *shape[dim + 1 :])
    return x


def _take_chunk(x: torch.Tensor, dim: int, blocks: int, parts: int, number: int) -> torch.Tensor:
    """Part `number` of each of `blocks` blocks along a dim."""
    shape = x.shape
    seen = x.reshape(*shape[:dim], blocks, parts, shape[dim] // blocks // parts, *shape[dim + 1 :])
    return seen.select(dim + 1, number).reshape(*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def _join_chunks(parts: list[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """The whole of which `parts` are the chunks: the inverse of `_take_chunk`."""
    shape = parts[0].shape
    seen = [part.reshape(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :]) for part in parts]
    return torch.stack(seen, dim + 1).reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def _take_ring(context: Context, x: torch.Tensor, dim: int, axis: str, after: int) -> torch.Tensor:
    """The rows of the rank that is `after` places after this one along a mesh axis."""
    own, ranks = context.place.position([axis])
    return _piece(x, dim, (own + after) % ranks, ranks)


def _join_ring(context: Context, parts: list[torch.Tensor], dim: int, axis: str) -> torch.Tensor:
    """The whole of which `parts` are the pieces of this rank and of the following ranks along a mesh axis."""
    own, ranks = context.place.position([axis])
    return torch.cat([parts[(number - own) % ranks] for number in range(ranks)], dim)


# Kernels that need values only, and kernels that need the buffer they write and the rank's place.
_PLAIN: dict[str, Callable[..., torch.Tensor]] = {
    "same": lambda x: x,
    "detach": lambda x: x.detach(),
    "permute": lambda x, order: x.permute(order),
    "range": _range,
    "select": lambda x, dim, index: x.select(dim, index),
    "piece": _piece,
    "take_chunk": _take_chunk,
    "join_chunks": _join_chunks,
    "bias": _bias,
    "softmax": softmax_of(torch.softmax),
    "log_softmax": softmax_of(torch.log_softmax),
    "rmsnorm": norm("rmsnorm"),
    "layernorm": norm("layernorm"),
    "groupnorm": _group_norm,
    "cross_entropy": _cross_entropy,
    "topk": _topk,
    "aten.as_strided.default": lambda x, *where: x.contiguous().as_strided(*where),
    "aten.as_strided_scatter.default": _put_strided,
    # The kernel makes a view of its product, which it cannot of operands that lie in another order.
    "aten.kron.default": lambda x, y: torch.kron(x.contiguous(), y.contiguous()),
    "view_as_complex": lambda x: torch.view_as_complex(x.contiguous()),
    "put_back": _put_back,
    "loss_rows": _loss_rows,
    "convolution": _convolution,
    "loss_weights": _loss_weights,
    "weight_norm": lambda v, g, dim: v * (g / torch.norm_except_dim(v, 2, dim)),
    **merged.PLAIN,
}
_PLACED: dict[str, Callable[..., torch.Tensor]] = {
    "reshape": _reshape,
    "expand": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "join_ring": _join_ring,
    "take_ring": _take_ring,
    "cast": lambda context, x: x.to(context.dtype),
    "embedding": _embedding,
    "rows": _rows,
    "grouped_mm": _grouped_product,
    "attention": _attention,
    "rotary": _rotary,
    "not_equal": _not_equal,
    "shard": _shard,
    "unshard": _unshard,
    **{f"reduce.{how}": _reduce(how) for how in ("sum", "mean", "amax", "amin")},
    **merged.PLACED,
    **routes.PLACED,
}
