"""Tensor parallelism, with or without sequence parallelism, as DTensor styles.

Projections into heads or inner width are cut by output ("colwise"), those out of it by input ("rowwise"), so that a
pair needs one sum (Megatron-LM, arXiv 1909.08053). Without sequence parallelism that sum is an all-reduce and
everything between pairs is computed on each rank; with it (arXiv 2205.05198) tokens are cut between pairs: the sum is
a reduce-scatter and an all-gather stands before the next pair. What moves per layer, forward: two of each; backward:
their mirror images.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from executor.attention import Attention
from executor.latent_attention import LatentAttention
from executor.model import Block, Decoder
from executor.tensor_overlap import overlap_block
from simulator.overlap_sites import NONE, mode_at


def apply_tensor_parallel(
    model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, experts_cut: bool, overlap: str = "none"
) -> None:
    """Cut a decoder over the one-dimensional `mesh`.

    Hidden states between blocks are plain tensors: of all tokens, or with `sequence_parallel` of this rank's share.
    `experts_cut`: experts lie whole on the ranks (expert parallelism), so tokens are routed where they are; otherwise
    each rank takes a slice of every expert's width. `overlap` is the plan's tp_overlap; see executor.tensor_overlap.
    """
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    ends: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        ends["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.output is not None:
        # The logits stay cut: VocabularyLoss takes them as they are.
        ends["output"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1))
        if sequence_parallel:
            ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    if model.tok_embeddings is not None:
        model.tok_embeddings.register_forward_hook(_not_a_view)
    model.tie()
    for block in model.layers.values():
        parallelize_module(block, mesh, _block_styles(block, between, experts_cut=experts_cut, overlap=overlap))
        overlap_block(block, overlap, mesh.get_group())


def _not_a_view(_module: nn.Module, _inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Copy what enters the first block.

    It would be a view of a DTensor, and a compiled block that takes one gives it no gradient: torch 2.13 leaves the
    embedding's at zero, in silence.
    """
    return out.clone()


def _block_styles(block: Block, between: Placement, *, experts_cut: bool, overlap: str) -> dict[str, ParallelStyle]:
    whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    styles: dict[str, ParallelStyle] = {"attention": whole, "attention.wo": RowwiseParallel(output_layouts=between)}
    if isinstance(block.attention, LatentAttention):
        # What is compressed is one for all heads: every rank compresses all tokens, and expands them for its heads.
        compressing = ("wq_a", "q_norm", "wkv_a", "kv_norm")
        held = [name for name in compressing if getattr(block.attention, name) is not None]
        styles |= {f"attention.{name}": Copied() for name in held}
        styles |= {"attention.wq_b": ColwiseParallel(), "attention.wkv_b": ColwiseParallel()}
    else:
        styles |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    if between.is_shard():
        styles |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    if isinstance(block.attention, Attention) and block.attention.q_norm is not None:
        # One weight for heads that are on different ranks: its gradient is a sum over them.
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        styles |= {"attention.q_norm": heads, "attention.k_norm": heads}
    if block.moe is not None:
        styles["moe"] = SparseParallel(between, experts_cut=experts_cut)
    else:
        styles |= {
            "feed_forward": whole,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
        }
    for site, module, norm in (
        ("attention_in", "attention", "attention_norm"),
        ("mlp_in", "feed_forward", "ffn_norm"),
    ):
        if module in styles and mode_at(overlap, site) != NONE:
            # The products gather by themselves, from plain tensors; their styles are for the weights alone.
            del styles[module]
            styles[norm] = SequenceParallel(use_local_output=True)
    return styles


class Copied(ParallelStyle):
    """Every rank holds the whole and computes the same from the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class SparseParallel(ParallelStyle):
    """Gives a sparse layer plain tensors to route.

    With experts whole on ranks, each rank routes its share of the tokens. Otherwise every rank routes all of them
    through a slice of each expert, and whatever lies inside has gradients that are parts of a sum.
    """

    def __init__(self, between: Placement, *, experts_cut: bool) -> None:
        super().__init__()
        self.between, self.experts_cut = between, experts_cut

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for linear in (module.router, module.shared_gate):
            if linear is not None:
                _cut(linear, device_mesh, Replicate())
        if module.router_bias is not None:
            bias = distribute_tensor(module.router_bias, device_mesh, [Replicate()])
            module.register_parameter("router_bias", nn.Parameter(bias, requires_grad=False))
        if module.shared is not None:
            for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
                _cut(getattr(module.shared, name), device_mesh, Replicate() if self.experts_cut else Shard(dim))
        if not self.experts_cut:
            for name, dim in (("w1", 1), ("w3", 1), ("w2", 2)):
                weight = distribute_tensor(getattr(module.experts, name), device_mesh, [Shard(dim)])
                module.experts.register_parameter(name, nn.Parameter(weight))

        def enter(_module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [self.between], run_check=False)
            if self.experts_cut:
                return x.to_local()
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def leave(_module: nn.Module, _inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            if self.experts_cut:
                return out
            total = DTensor.from_local(out, device_mesh, [Partial()], run_check=False)
            return total.redistribute(placements=[self.between]).to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def _cut(linear: nn.Linear, mesh: DeviceMesh, placement: Placement) -> None:
    linear.register_parameter("weight", nn.Parameter(distribute_tensor(linear.weight, mesh, [placement])))
