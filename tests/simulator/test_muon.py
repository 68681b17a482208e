"""Muon: states, products and gathers, against torch's own optimizer and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.question.question import Question, question_of
from simulator.analytical.estimates import EstimateTable, calibrated_operators, cost_context, estimate_plans
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import plan_columns
from simulator.columns.plan_table import plan_table
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.model import Model
from simulator.config.optimizers import OPTIMIZERS
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.engine.simulate import simulate
from simulator.lowering.training import lower_training
from simulator.memory.plan_memory import PlanMemory
from simulator.step.context import CostContext
from simulator.step.muon import ITERATIONS, Matrix, _gathered, hidden_matrices, matrix_s, orthogonalised
from topology.catalog.clusters import cluster

NAMES = ("llama3-8b", "gpt2", "deepseek-v2-lite", "mixtral-8x7b", "qwen2.5-7b")


def asked(model: Model, optimizer: str, gpus: int = 1) -> Question:
    return question_of(
        model,
        cluster("dgx-h100", gpus=gpus),
        Workload(seq_len=1024, global_batch_size=8),
        framework="pytorch",
        runtime=Runtime(name="pytorch", optimizer=optimizer),
        gpus=gpus,
    )


def costed(name: str, optimizer: str, plan: Plan) -> EstimateTable:
    return estimate_plans(asked(load_model(name), optimizer, plan.gpus), [plan])


def context_of(model: Model, plan: Plan) -> CostContext:
    question = asked(model, "muon", plan.gpus)
    table = plan_table([plan], question.workload)
    return cost_context(question, table, calibrated_operators(question))


@pytest.mark.parametrize("name", NAMES)
def test_hidden_matrices_are_all_of_a_layers_weights_but_norms_and_biases(name: str) -> None:
    model = load_model(name)
    found = hidden_matrices(model)

    dense = model.attention_matmul_parameters + model.mlp_matmul_parameters(model.ffn)
    assert sum(matrix.elements for matrix in found["dense"]) == dense
    if model.moe:
        experts = sum(matrix.elements for matrix in found["moe"] if matrix.of_expert)
        assert experts == model.mlp_matmul_parameters(model.moe.ffn)
        shared = model.moe.experts * model.hidden + model.mlp_matmul_parameters(model.moe.shared_ffn)
        others = sum(matrix.elements for matrix in found["moe"] if not matrix.of_expert)
        assert others == model.attention_matmul_parameters + shared


@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (64, 24), (32, 32)])
def test_flops_and_states_are_those_of_torchs_own_step(rows: int, columns: int) -> None:
    torch = pytest.importorskip("torch", minversion="2.9")
    from torch.utils.flop_counter import FlopCounterMode

    weight = torch.nn.Parameter(torch.randn(rows, columns))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.Muon([weight])
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    kept = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]

    assert counted.get_total_flops() == ITERATIONS * Matrix(rows=rows, columns=columns).iteration_flops
    assert optimizer.defaults["ns_steps"] == ITERATIONS
    muon = OPTIMIZERS["muon"].matrices
    assert muon is not None
    assert muon.state_bytes(4.0) * weight.numel() == sum(value.numel() * value.element_size() for value in kept)


@pytest.mark.parametrize(("name", "plan"), [("llama3.2-1b", Plan()), ("mixtral-8x7b", Plan(dp_shard=8, ep=4))])
def test_hidden_matrices_keep_one_moment_and_the_rest_two(name: str, plan: Plan) -> None:
    model = load_model(name)
    held = {one: costed(name, one, plan).memory.categories["optimizer"][0, 0] for one in ("muon", "adamw")}
    found = hidden_matrices(model)
    layers = {"dense": model.dense_layers, "moe": model.moe_layers}
    experts = model.moe.experts if model.moe else 0
    hidden = sum(
        layers[block] * sum(one.elements * (experts if one.of_expert else 1) for one in matrices)
        for block, matrices in found.items()
    )

    assert held["adamw"] - held["muon"] == pytest.approx(4.0 * hidden / plan.gpus)


@pytest.mark.parametrize("plan", [Plan(), Plan(dp_shard=2), Plan(tp=2), Plan(dp_replicate=2)])
def test_ranks_hold_less_than_with_adamw(plan: Plan) -> None:
    model = replace(load_model("llama3.2-1b"), layers=3)
    muon, adamw = (PlanMemory(asked(model, name, plan.gpus), plan).rank(0) for name in ("muon", "adamw"))
    least = estimate_plans(asked(model, "muon", plan.gpus), [plan]).memory

    assert least.reserved_bytes[0, 0] <= muon.reserved_bytes < adamw.reserved_bytes


@pytest.mark.parametrize("rows_cut", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (64, 24), (32, 32)])
def test_what_is_cut_moves_and_multiplies_as_torchs_own_does(rows: int, columns: int, *, rows_cut: bool) -> None:
    """torch.optim.Muon on a DTensor over four ranks that exchange nothing: what it asks them to."""
    torch = pytest.importorskip("torch", minversion="2.9")
    seen = _run_on_four_ranks(torch, rows, columns, dim=0 if rows_cut else 1)
    matrix, plan = Matrix(rows=rows, columns=columns, cut_rows=rows_cut), Plan(dp_shard=4) if rows_cut else Plan(tp=4)
    context = context_of(load_model("llama3-8b"), plan)

    _, moved = _gathered(matrix, load_model("llama3-8b"), context)
    ours: dict[str, float] = {}
    for op, _, nbytes, count in moved:
        ours[op] = ours.get(op, 0.0) + float((nbytes * count)[0])

    assert {op: nbytes for op, nbytes in ours.items() if nbytes} == seen["bytes"]
    whole, part = matrix.iteration_flops, sum(seen["flops"])
    along = matrix.cut_along(rows=rows_cut)
    kept = 2 * matrix.short**3 if along == "long" else 0.0  # the second product is whole on every rank
    assert part == ITERATIONS * (kept + (whole - kept) / 4)


def _run_on_four_ranks(torch: Any, rows: int, columns: int, *, dim: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, Any] = {"bytes": {}, "flops": []}
    names = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather"}

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            name, out = str(func).split(".")[1], func(*args, **(kwargs or {}))
            if name in names and out.dim():
                op = names[name]
                found["bytes"][op] = found["bytes"].get(op, 0.0) + out.numel() * out.element_size()
            if name in {"mm", "addmm"}:
                left = args[-2]
                found["flops"].append(2.0 * out.numel() * left.shape[-1])
            return out

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        weight = torch.nn.Parameter(distribute_tensor(torch.randn(rows, columns), mesh, [Shard(dim)]))
        weight.grad = distribute_tensor(torch.randn(rows, columns), mesh, [Shard(dim)])
        optimizer = torch.optim.Muon([weight])
        optimizer.step()  # DTensor has found out how each operator is divided
        with Seen():
            optimizer.step()
    finally:
        dist.destroy_process_group()
    return found


def test_experts_lie_whole_on_their_ranks() -> None:
    sparse = load_model("mixtral-8x7b")
    for plan, experts, gathered in (
        (Plan(dp_shard=8), 1, 0),
        (Plan(dp_shard=8, ep=4), 1, 0),
        (Plan(dp_shard=16), 8, 8),
    ):
        context = context_of(sparse, plan)
        found = orthogonalised(sparse, "moe", context)
        matrices = hidden_matrices(sparse)["moe"]
        alone = sum(matrix_s(one, context) * (experts if one.of_expert else 1) for one in matrices)
        moved_bytes = sum(float((nbytes * count)[0]) for _, one, nbytes, count in found.gathers if one == "expert_fsdp")
        assert found.seconds[0] == pytest.approx(alone[0])
        assert moved_bytes == 2 * gathered * sparse.one_expert_parameters


@given(
    rows=st.integers(64, 8192), columns=st.integers(64, 8192), more_rows=st.integers(0, 4096), more=st.integers(0, 4096)
)
def test_a_larger_matrix_has_no_fewer_flops(rows: int, columns: int, more_rows: int, more: int) -> None:
    smaller, larger = Matrix(rows=rows, columns=columns), Matrix(rows=rows + more_rows, columns=columns + more)

    assert larger.iteration_flops >= smaller.iteration_flops
    assert Matrix(rows=columns, columns=rows).iteration_flops == smaller.iteration_flops


def test_a_larger_model_never_updates_faster() -> None:
    base = load_model("llama3-8b")
    grown = [base, replace(base, layers=40), replace(base, layers=40, ffn=16384)]
    grown.append(replace(grown[-1], hidden=5120, heads=40))
    for plan in (Plan(), Plan(dp_shard=8)):
        updates = [
            float(estimate_plans(asked(model, "muon", plan.gpus), [plan]).breakdown_s["optimizer"][0])
            for model in grown
        ]
        assert updates == sorted(updates)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama3-8b", Plan()),
        ("llama3-8b", Plan(dp_shard=4)),
        ("llama3-8b", Plan(dp_replicate=2, tp=2)),
        ("llama3-8b", Plan(dp_shard=2, pp=2)),
        ("llama3-8b", Plan(dp_replicate=2, dp_shard=4)),
        ("llama3-8b", Plan(dp_shard=2, pp=2, virtual_stages=2, schedule="Interleaved1F1B")),
        ("mixtral-8x7b", Plan(dp_shard=2, pp=2, ep=2)),
        ("mixtral-8x7b", Plan(dp_shard=8, ep=4)),
    ],
)
def test_levels_of_detail_agree_and_bounds_lie_below(name: str, plan: Plan) -> None:
    model = replace(load_model(name), layers=4)
    question = asked(model, "muon", plan.gpus)
    table = estimate_plans(question, [plan])
    account_s = float(table.step_s[0] - table.breakdown_s["allocator"][0])
    lowered = lower_training(question, plan)
    columns, screening = plan_columns([plan]), Screening(question)
    some = screening.plans(columns, screening.blocks(columns, (plan.recompute,)), np.arange(1))

    assert account_s == pytest.approx(simulate(lowered.program, lowered.costs, spans=False).step_s, rel=0.01)
    assert some.at_least_s()[0] <= account_s


def test_what_is_not_modelled_is_refused_by_name_and_reason() -> None:
    model = load_model("llama3-8b")
    for runtime, said in (
        ("torchtitan", "pull request 3719"),
        ("transformers", "pull request 39541"),
        ("megatron-lm", "muon-tp-mode"),
        ("deepspeed", "8442"),
        ("nemo-automodel", "all-to-all"),
        ("nanotron", "no Muon that is known"),
    ):
        question = replace(asked(model, "muon"), runtime=Runtime(name=runtime, optimizer="muon"))
        assert any(said in problem.message for problem in question.problems(Plan())), runtime
    assert not asked(model, "muon").problems(Plan())
    assert any("host memory" in one.message for one in asked(model, "muon").problems(Plan(offload="parameters")))
    adapted = Runtime(name="pytorch", optimizer="muon", adapter=Adapter(rank=8, target_modules=("q_proj",)))
    assert "frozen" in adapted.not_modelled
