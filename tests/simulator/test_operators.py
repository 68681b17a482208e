"""An operator's work is counted from its annotation: checked against counting by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from simulator.analytical.scenario import Scenario
from simulator.config.hf_config import load_model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.operators import (
    OperatorSpec,
    Work,
    WorkKind,
    active_rows,
    backward_work,
    forward_work,
    parse_matmul,
    tensor_bytes,
)
from simulator.lowering.training import plan_context
from simulator.runtimes.library import spec_for
from simulator.runtimes.model_operators import operators_for
from topology.catalog.clusters import cluster
from topology.errors import BadInput

SIZES = {
    name: np.array([float(value)])
    for name, value in {
        "one": 1,
        "b": 2,
        "s": 16,
        "S": 16,
        "D": 16,
        "P": 1,
        "t": 32,
        "j": 8.5,
        "h": 64,
        "q": 64,
        "kv": 16,
        "a": 4,
        "d": 16,
        "v": 100,
    }.items()
}


def dtype_bytes(name: str) -> float:
    return {"compute": 2.0, "f32": 4.0, "mask": 1.0, "reduce": 4.0}[name]


def test_plain_product_has_two_flops_per_multiply() -> None:
    """2 m n k FLOPs; each operand and the result move once."""
    (work,) = forward_work(OperatorSpec(name="w", matmul="t h, h q -> t q"), SIZES, dtype_bytes)

    assert work.kind is WorkKind.MATMUL
    assert (work.m[0], work.n[0], work.k[0], work.batch[0]) == (32, 64, 64, 1)
    assert work.flops[0] == 2 * 32 * 64 * 64
    assert work.bytes[0] == 2 * (32 * 64 + 64 * 64 + 32 * 64)


def test_axes_in_all_three_tensors_are_batch() -> None:
    """Scores are one product per sequence and head."""
    (work,) = forward_work(OperatorSpec(name="qk", matmul="b a s d, b a d S -> b a s S"), SIZES, dtype_bytes)

    assert (work.batch[0], work.m[0], work.n[0], work.k[0]) == (8, 16, 16, 16)


def test_backward_of_a_product_is_its_two_products() -> None:
    """The input's gradient and the weight's gradient cost as much as forward each."""
    spec = OperatorSpec(name="w", matmul="t h, h q -> t q")
    (forward,) = forward_work(spec, SIZES, dtype_bytes)

    dgrad, wgrad = backward_work(spec, SIZES, dtype_bytes)

    assert dgrad.flops[0] == wgrad.flops[0] == forward.flops[0]
    assert (dgrad.m[0], dgrad.n[0], dgrad.k[0]) == (32, 64, 64)
    assert (wgrad.m[0], wgrad.n[0], wgrad.k[0]) == (64, 64, 32)


def test_weight_gradient_in_float32_moves_two_more_bytes_per_weight() -> None:
    plain = OperatorSpec(name="w", matmul="t h, h q -> t q")
    wide = OperatorSpec(name="w", matmul="t h, h q -> t q", weight_gradient_dtype="reduce")

    extra = backward_work(wide, SIZES, dtype_bytes)[1].bytes - backward_work(plain, SIZES, dtype_bytes)[1].bytes

    assert extra[0] == 2 * 64 * 64


def test_causal_attention_counts_the_triangle() -> None:
    """Scores and context over the (s + 1) / 2 keys a query sees on average, two FLOPs each; backward 2.5 times."""
    spec = OperatorSpec(name="sdpa", attention="flash")
    triangle = sum(range(1, 17))  # query-key pairs of one head of one sequence

    (forward,) = forward_work(spec, SIZES, dtype_bytes)
    (backward,) = backward_work(spec, SIZES, dtype_bytes)

    assert forward.flops[0] == 2 * (2 * triangle * 16) * 4 * 2
    assert backward.flops[0] == 2.5 * forward.flops[0]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather"), ("all_to_all", "all_to_all")],
)
def test_backward_of_a_collective_is_its_transpose(forward: str, backward: str) -> None:
    spec = OperatorSpec(name="c", collective=forward, tensor="t h", over="tp")

    assert [w.collective for w in forward_work(spec, SIZES, dtype_bytes)] == [forward]
    assert [w.collective for w in backward_work(spec, SIZES, dtype_bytes)] == [backward]


def test_identity_into_a_tensor_parallel_region_sums_in_backward() -> None:
    """Megatron's f: nothing forward, an all-reduce backward; its g is the reverse."""
    f = OperatorSpec(name="f", collective="copy", tensor="t h", over="tp")
    g = OperatorSpec(name="g", collective="all_reduce", tensor="t h", over="tp")

    assert forward_work(f, SIZES, dtype_bytes) == []
    assert [w.collective for w in backward_work(f, SIZES, dtype_bytes)] == ["all_reduce"]
    assert [w.collective for w in forward_work(g, SIZES, dtype_bytes)] == ["all_reduce"]
    assert backward_work(g, SIZES, dtype_bytes) == []


def test_tensor_annotations_take_a_dtype_and_a_factor() -> None:
    assert tensor_bytes("t h", SIZES, dtype_bytes)[0] == 32 * 64 * 2
    assert tensor_bytes("t v:f32", SIZES, dtype_bytes)[0] == 32 * 100 * 4
    assert tensor_bytes("3*t h", SIZES, dtype_bytes)[0] == 3 * 32 * 64 * 2


def test_unknown_axis_is_named() -> None:
    with pytest.raises(BadInput, match="'zz'"):
        tensor_bytes("t zz", SIZES, dtype_bytes)


@pytest.mark.parametrize("text", ["t h -> t q", "t h, h q", "", "t h h q t q"])
def test_malformed_product_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_matmul(text)


# Bytes that torch's context parallelism moves besides attention and collectives, in sizes of a rank's queries and of
# its keys, forward and backward: a dispatch mode's count of torchtitan's attention on the last rank of torch's `fake`
# process group, less what it counts without context parallelism and what log-sum-exps take (torch 2.11,
# tests/bench/titan_host_cost.py runs the same modules).
CONTEXT_PARALLEL_BYTES = {2: ((25, 8), (15, 71)), 4: ((63, 16), (25, 121))}


@pytest.mark.parametrize("cp", CONTEXT_PARALLEL_BYTES)
def test_context_parallelism_moves_what_torch_counts(cp: int) -> None:
    """Keys laid out and joined, parts of attention merged, gradients added up; nothing of it with one rank."""
    model, workload = load_model("llama3-8b"), Workload(seq_len=32768, global_batch_size=1)
    operators = operators_for(model, Runtime(name="torchtitan")).dense_layer
    ours = [x for x in operators if x.name in {"kv_layout", "kv_join", "merge_float", "merge_partials"}]

    def moved(plan: Plan, works: Callable[..., list[Work]]) -> float:
        scenario = Scenario(model=model, cluster=cluster("dgx-h100"), workload=workload, runtime=Runtime())
        context = plan_context(scenario, plan)
        active = {x.name: float(active_rows(x, context.table)[0]) for x in ours}
        return sum(
            float(np.ravel(w.bytes)[0]) * active[x.name]
            for x in ours
            for w in works(x, context.sizes, context.dtype_bytes)
        )

    queries = 32768 / cp * model.hidden * 2
    for method in ("all_gather", "ring"):
        for works, (of_queries, of_keys) in zip((forward_work, backward_work), CONTEXT_PARALLEL_BYTES[cp], strict=True):
            counted = queries * (of_queries + of_keys * model.kv_heads / model.heads)
            assert moved(Plan(cp=cp, cp_method=method), works) == pytest.approx(counted)
            assert moved(Plan(cp=1, cp_method=method), works) == 0.0


@pytest.mark.parametrize("name", ["torchtitan", "transformers"])
def test_parts_of_a_ring_are_held_one_at_a_time(name: str) -> None:
    """`w` counts what all other ranks' keys take; torch's loop over them frees each part's tensors before the next."""
    parts = [op for op in spec_for(Runtime(name=name)).layer.attention if any("w t" in x for x in op.writes)]

    assert parts
    for op in parts:
        held = [op.writes if op.allocates is None else op.allocates, op.backward_allocates or ()]
        assert not any("w t" in tensor for tensors in held for tensor in tensors), op.name


def test_shares_of_sinks_move_what_torch_moves_for_them():
    """AutoModel's lines after FlexAttention (components/attention/flex_attention.py, utils.py), run by torch."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    moved = [0, 0]

    class Moved(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            if all(out.data_ptr() != one.data_ptr() for one in tensors):  # a view moves nothing
                moved[0] += sum(one.nbytes for one in tensors)
                moved[1] += out.nbytes
            return out

    given = torch.randn(1, 4, 256, 256, dtype=torch.bfloat16, requires_grad=True)
    given_lse, sinks = torch.randn(1, 4, 256), torch.randn(4, dtype=torch.bfloat16)
    scores = given * 1  # no leaf: its gradient is not copied
    with Moved():
        share = torch.sigmoid(given_lse.requires_grad_() - sinks.view(1, -1, 1)).unsqueeze(-1)
        out = (scores * share).to(torch.bfloat16).transpose(1, 2).contiguous()
    forward, moved[:] = [*moved], [0, 0]
    gradient = torch.randn_like(out)
    with Moved():
        torch.autograd.grad(out, (scores, given_lse), gradient)
    spec = next(one for one in spec_for(Runtime(name="nemo-automodel")).layer.attention if one.name == "sink_share")
    width = {"t q": 2, "t q:f32": 4, "2*t q": 4, "4*t q:f32": 16, "3*t q:f32": 12}
    said = [sum(width[one] for one in side) for side in (spec.reads, spec.writes)]
    said_back = [sum(width[one] for one in side) for side in (spec.backward_reads, spec.backward_writes)]

    assert [nbytes / given.numel() for nbytes in forward] == pytest.approx(said, rel=0.02)  # and one number a row
    assert [nbytes / given.numel() for nbytes in moved] == pytest.approx(said_back, rel=0.02)


def test_dense_models_of_a_runtime_have_the_layers_it_says():
    """AutoModel's dense networks are transformers'; its networks of experts are its own."""
    automodel, transformers = Runtime(name="nemo-automodel"), Runtime(name="transformers")
    dense, experts = load_model("llama3-8b"), load_model("gpt-oss-20b")

    assert operators_for(dense, automodel).dense_layer == operators_for(dense, transformers).dense_layer
    own = [operator.name for operator in operators_for(experts, automodel).moe_layer]
    assert own != [operator.name for operator in operators_for(experts, transformers).moe_layer]
    assert {"expert_fc1_bias", "expert_fc2_bias"} <= {*own}
    assert "expert_fc1_bias" not in [o.name for o in operators_for(load_model("qwen3-30b-a3b"), automodel).moe_layer]


def bytes_forward(version: str | None, model: str, *, name: str) -> float:
    """Return what the operators of a name move in torchtitan's forward pass of a layer with TP 8."""
    runtime, plan = Runtime(name="torchtitan", version=version), Plan(tp=8, sequence_parallel=True)
    workload, network = Workload(seq_len=4096, global_batch_size=8), load_model(model)
    context = plan_context(
        Scenario(model=network, cluster=cluster("dgx-h100"), workload=workload, runtime=runtime), plan
    )
    layer = operators_for(network, runtime).dense_layer
    work = (w for o in layer if o.name == name for w in forward_work(o, context.sizes, context.dtype_bytes))
    return float(sum(np.sum(w.bytes) for w in work))


def test_keys_and_values_were_repeated_for_every_head() -> None:
    """Until torchtitan's pull request 2259: read once, written for as many heads as queries have."""
    tokens, width = 4096, 128
    moved = {v: bytes_forward(v, "llama3-8b", name="repeat_kv") for v in ("0.2.1", "2025-12", "0.2.2", None)}

    assert moved["0.2.1"] == moved["2025-12"] == 2 * 2 * tokens * width * (1 + 4)
    assert moved["0.2.2"] == moved[None] == 0
    assert bytes_forward("0.2.1", "llama2-7b", name="repeat_kv") == 0  # as many as queries have


def test_qwens_norms_gathered_the_heads_of_all_ranks() -> None:
    """Until torchtitan's pull request 1870: 32 and 8 heads of 128, where a rank has 4 and one."""
    tokens = 4096

    assert bytes_forward("0.1", "qwen3-8b", name="gather_heads") == 2 * tokens * (32 + 8) * 128
    assert bytes_forward("0.2", "qwen3-8b", name="gather_heads") == 0
    assert bytes_forward("0.1", "llama3-8b", name="gather_heads") == 0
    assert bytes_forward("0.1", "qwen3-8b", name="rotary") == 8 * bytes_forward("0.2", "qwen3-8b", name="rotary")
