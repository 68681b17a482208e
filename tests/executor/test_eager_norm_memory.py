"""What a norm of one kernel an operator keeps, and what torchtitan's description before torch had a kernel says."""

import pytest

from simulator.config.runtime import Runtime
from simulator.runtimes.library import spec_for

torch = pytest.importorskip("torch")

BYTES = {"": 2, "f32": 4}


def test_norms_of_before_torch_had_a_kernel_keep_a_float32_input() -> None:
    """Torchtitan before pull request 985, models/norms.py: RMSNorm, in bfloat16 as FSDP casts its weight."""
    x, weight = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((64, 256), (256,)))
    kept: dict[int, int] = {}

    def pack(tensor):
        if tensor.numel() == x.numel():
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        out = normed * weight

    spec = spec_for(Runtime(name="torchtitan", version="2024-12"))
    norm = next(o for o in spec.layer.attention if o.name == "attention_norm" and "!autocast" in o.when)
    described = sum(BYTES[tensor.partition(":")[2]] for tensor in norm.saves)
    assert out.dtype == torch.bfloat16
    assert sum(kept.values()) == described * x.numel()
