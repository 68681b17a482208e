"""Mixed precision of a rank that shards nothing: parameters are stored in one type and computed with in another.

Unit by unit, as FSDP2 does it over one rank and with the same results: a block's parameters are cast to one flat tensor
before its forward pass, which is freed after it, and again before its backward pass; after that its gradients are added
to those of the stored parameters. FSDP2 takes eight times as long on the host, which tensor parallelism waits for in
narrow layers, and packs gradients for a reduction that one rank does not need (examples/profiles/hosts.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.model.decoder import Decoder

ALIGNMENT = 256  # bytes, more than a tensor map needs


class CastUnit:
    """The parameters of `modules`, which run one after the other, in the type `compute` while these run.

    `stays`: they are kept between the forward and the backward pass. `ends`: no input of the unit has a gradient, and
    the unit's last gradient is that of its first parameter.
    """

    def __init__(self, modules: Sequence[nn.Module], compute: torch.dtype, *, stays: bool, ends: bool) -> None:
        self.stays, self._ends, self._compute = stays, ends, compute
        self._places = [
            (module, name, parameter)
            for outer in modules
            for module in outer.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        # Each once, if tied.
        self._stored: list[Tensor] = list(dict.fromkeys(parameter for _, _, parameter in self._places))
        self._flat, self._narrow = self._allocate()
        modules[0].register_forward_pre_hook(self._before)
        modules[-1].register_forward_hook(self._after)

    def _allocate(self) -> tuple[Tensor, list[nn.Parameter]]:
        """Return the flat tensor, whose memory comes and goes, and its views."""
        step = ALIGNMENT // self._compute.itemsize
        starts = [0]
        for parameter in self._stored:
            starts.append(starts[-1] + -(-parameter.numel() // step) * step)
        flat = torch.empty(starts[-1], dtype=self._compute, device=self._stored[0].device)
        narrow = [
            nn.Parameter(flat[start : start + p.numel()].view(p.shape), requires_grad=p.requires_grad)
            for p, start in zip(self._stored, starts, strict=False)
        ]
        if self._ends:
            # With a strong reference to this object, the hook would keep everything alive: gc cannot see hooks.
            collect = weakref.WeakMethod(self._collect)

            def collected(parameter: Tensor) -> None:
                if (call := collect()) is not None:
                    call(parameter)

            narrow[0].register_post_accumulate_grad_hook(collected)
        self._bytes, self._here = flat.untyped_storage().nbytes(), True
        self._targets = [one.detach() for one in narrow]
        by_stored = dict(zip(self._stored, narrow, strict=True))
        self._swaps = [(module, name, stored, by_stored[stored]) for module, name, stored in self._places]
        self._free(flat)
        return flat, narrow

    def _free(self, flat: Tensor) -> None:
        if self._here:
            flat.untyped_storage().resize_(0)
            self._here = False

    @torch.no_grad()
    def _cast(self) -> None:
        """Let the modules have the narrow parameters."""
        if not self._here:
            self._flat.untyped_storage().resize_(self._bytes)
            self._here = True
            # They are what they were when the forward pass saved them.
            with torch.autograd._unsafe_preserve_version_counter(self._flat):  # type: ignore[attr-defined]  # noqa: SLF001 - as FSDP2 does
                torch._foreach_copy_(self._targets, self._stored)
        for module, name, _, narrow in self._swaps:
            module._parameters[name] = narrow  # noqa: SLF001 - nn.Module's own way takes as long as the cast

    def _restore(self, *, free: bool) -> None:
        for module, name, stored, _ in self._swaps:
            module._parameters[name] = stored  # noqa: SLF001 - as above
        if free:
            self._free(self._flat)

    def _before(self, _module: nn.Module, given: tuple[Any, ...]) -> None:
        self._cast()
        if not self._ends and given[0].requires_grad:
            given[0].register_hook(self._collect)

    def _after(self, _module: nn.Module, _given: tuple[Any, ...], out: Tensor) -> None:
        self._restore(free=not (self.stays and out.requires_grad))
        if out.requires_grad and (self.stays or not self._ends):  # an embedding's gradient does not need it
            out.register_hook(self._again)

    def _again(self, _grad: Tensor) -> None:
        """Before the backward pass."""
        self._cast()

    @torch.no_grad()
    def _collect(self, _tensor: Tensor) -> None:
        """After the backward pass: autograd computes a unit's weight gradients before it goes on from its input."""
        fresh: list[Tensor] = []
        made: list[Tensor] = []
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for stored, narrow in zip(self._stored, self._narrow, strict=True):
            if narrow.grad is None:
                continue
            if stored.grad is None:
                stored.grad = torch.empty_like(stored)
                made.append(stored.grad)
                fresh.append(narrow.grad)
            else:
                sums.append(stored.grad)
                added.append(narrow.grad)
        if made:
            torch._foreach_copy_(made, fresh)
        if sums:
            torch._foreach_add_(sums, added)
        for narrow in self._narrow:
            narrow.grad = None
        self._restore(free=True)


def cast_units(model: Decoder, compute: torch.dtype, *, reshard_after_forward: bool) -> list[CastUnit]:
    """Make units of each block, of the embedding, and of [norm, output]; of embedding, norm and output if tied.

    Call it when the parameters are on their device. The units live as long as the model.
    """
    stays = not reshard_after_forward
    units = [CastUnit([block], compute, stays=stays, ends=False) for block in model.blocks().values()]
    embedding, norm, output = model.tok_embeddings, model.norm, model.output
    assert embedding is not None and norm is not None and output is not None  # noqa: S101, PT018 - no stage of a pipeline
    if model.tied:
        return [*units, CastUnit([embedding, norm, output], compute, stays=True, ends=True)]
    # Backward starts with these, so freeing them after forward would only cost another cast.
    units.append(CastUnit([norm, output], compute, stays=True, ends=False))
    return [*units, CastUnit([embedding], compute, stays=stays, ends=True)]
