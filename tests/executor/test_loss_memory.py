"""What torch itself allocates in a loss, or in a norm of transformers, replayed through our model of its allocator."""

from __future__ import annotations

import weakref

import pytest

from simulator.config.runtime import Runtime
from simulator.kernels.operators import FIXED_DTYPE_BYTES
from simulator.memory.allocator import Block, CachingAllocator
from simulator.runtimes.library import head_left, head_peaks, spec_for

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the skip
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402 - after the skip
from torch.distributed.tensor import DTensor, Shard  # noqa: E402 - after the skip
from torch.distributed.tensor.parallel import loss_parallel  # noqa: E402 - after the skip
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - after the skip
from torch.utils._pytree import tree_flatten  # noqa: E402 - after the skip
from torch.utils.checkpoint import checkpoint  # noqa: E402 - after the skip

TOKENS, WIDTH, VOCABULARY = 2048, 32, 8192
SCALE = 64  # bytes are counted so many times, so that no block is a small one


class Allocated(TorchDispatchMode):
    """Tells a pool of every storage that operators make, and of its end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = CachingAllocator(expandable=False)
        self.places: dict[int, Block] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it runs on local tensors is seen
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.nbytes() and storage._cdata not in self.places:
                self.places[storage._cdata] = self.pool.allocate(storage.nbytes() * SCALE, "")
                weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, key: int) -> None:
        self.pool.free(self.places.pop(key))


def per_logit(tensors) -> float:
    """Return the bytes of tensors of a description for each number of the logits."""
    total = 0.0
    for text in tensors:
        axes, _, dtype = text.partition(":")
        factor, _, _ = axes.split()[0].rpartition("*")
        total += float(factor or 1) * (FIXED_DTYPE_BYTES[dtype] if dtype else 2.0)
    return total


@pytest.mark.parametrize("name", ["torchtitan", "pytorch"])
def test_an_eager_loss_holds_what_its_description_says(name):
    """Cross entropy in float32 of 16-bit logits that the trainer frees before backward."""
    weight = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    with Allocated() as found:
        logits = torch.nn.functional.linear(tokens, weight)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        del logits
        loss.backward()

    runtime, logits_bytes = Runtime(name=name), SCALE * TOKENS * VOCABULARY
    layer = spec_for(runtime).layer
    peak = max(per_logit(moment) for moment in head_peaks(layer, runtime))
    assert found.pool.peak_allocated_bytes / logits_bytes == pytest.approx(peak, rel=0.02)
    left = per_logit(head_left(layer, runtime))
    assert found.pool.reserved_bytes / logits_bytes == pytest.approx(peak + left, rel=0.03)


def test_a_loss_over_a_cut_vocabulary_holds_what_its_description_says():
    """`loss_parallel` of torch, on a mesh of one rank, whose share is the whole."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(TOKENS, dtype=torch.int64)
        with Allocated() as found, loss_parallel():
            logits = DTensor.from_local(local * 1.0, mesh, [Shard(1)])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="mean")
            del logits
            loss.backward()
    finally:
        dist.destroy_process_group()

    runtime = Runtime(name="torchtitan")
    peak = max(per_logit(moment) for moment in head_peaks(spec_for(runtime).layer, runtime, cut=True))
    assert found.pool.peak_allocated_bytes / (SCALE * TOKENS * VOCABULARY) == pytest.approx(peak, rel=0.02)


def test_losses_in_pieces_hold_what_their_descriptions_say():
    """LinearCrossEntropyLoss of torchtune keeps all log-probabilities; TRL's runs pieces of 256 tokens again."""
    found = {}
    for name in ("torchtune", "trl"):
        weight = torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(TOKENS, dtype=torch.int64)

        def piece(some, wanted, weight=weight):
            logits = torch.nn.functional.linear(some, weight)
            return torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum")

        with Allocated() as seen:
            losses = [
                piece(some, wanted) if name == "torchtune" else checkpoint(piece, some, wanted, use_reentrant=False)
                for some, wanted in zip(tokens.split(256), labels.split(256), strict=True)
            ]
            sum(losses).backward()
        found[name] = seen.pool.peak_allocated_bytes / (SCALE * TOKENS * VOCABULARY)

    runtimes = [Runtime(name=name, savers=("chunked_loss",)) for name in ("torchtune", "trl")]
    tune, trl = (
        max(
            per_logit(x.replace("256*one v", "0.125*t v") for x in moment if "v" in x and "h" not in x)
            for moment in head_peaks(spec_for(runtime).layer, runtime)
        )
        for runtime in runtimes
    )
    weights = 2 * 2.0 * WIDTH / TOKENS  # the gradient of the head, and one of a piece of it
    assert found["torchtune"] == pytest.approx(tune + weights, rel=0.03)
    # Its counts of right tokens and their entropy, which are not run here, make one piece more.
    assert found["trl"] == pytest.approx(trl - 0.125 * 4 + weights, rel=0.05)


def test_an_eager_norm_of_transformers_holds_what_its_description_says():
    """LlamaRMSNorm (transformers 5.17, models/llama/modeling_llama.py): what it holds while it runs, keeps, and holds
    next to that on the way back.
    """
    elements = TOKENS * WIDTH
    given = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    with Allocated() as found:
        wide = given.to(torch.float32)
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        result = weight * (wide * root).to(given.dtype)
        del wide, root
        forward, kept = found.pool.peak_allocated_bytes, found.pool.allocated_bytes
        result.backward(gradient)
    backward = found.pool.peak_allocated_bytes - kept

    norms = [op for op in spec_for(Runtime(name="transformers")).layer.attention if op.name == "attention_norm"]
    eager = next(op for op in norms if "!fused_layers" in op.when)
    rows = 4 / WIDTH + 2 / WIDTH  # a root for each row, and blocks of the pool
    assert forward / SCALE / elements == pytest.approx(per_logit(eager.allocates), rel=rows)
    assert kept / SCALE / elements == pytest.approx(per_logit(eager.saves) + 2.0, rel=rows), "its result, too"
    assert backward / SCALE / elements == pytest.approx(per_logit(eager.backward_allocates), rel=rows)


def test_biases_of_experts_hold_what_the_description_of_automodel_says():
    """`_apply_bias` of AutoModel (components/moe/experts.py) behind the second product of experts."""
    elements, spread = TOKENS * WIDTH, torch.tensor([TOKENS // 4] * 4)
    product = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(TOKENS, 1, requires_grad=True)
    gradient = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    with Allocated() as found:
        written = torch.repeat_interleave(bias.to(torch.float32), spread, dim=0, output_size=TOKENS) * weights
        result = (product + written).to(torch.bfloat16)
        del written
        forward, kept = found.pool.peak_allocated_bytes, found.pool.allocated_bytes
        result.backward(gradient)
    backward = found.pool.peak_allocated_bytes - kept

    experts = spec_for(Runtime(name="nemo-automodel")).layer.moe
    biased = next(op for op in experts if op.name == "expert_fc2_bias")
    rows = 4 * 4 / WIDTH  # the router's weights and their gradients, bytes an element
    assert forward / SCALE / elements == pytest.approx(per_logit(biased.writes), abs=rows)
    assert kept / SCALE / elements == pytest.approx(per_logit(biased.saves) + 2.0, abs=rows), "its result, too"
    assert backward / SCALE / elements == pytest.approx(per_logit(biased.backward_allocates), abs=rows)
