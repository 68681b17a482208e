"""Optimizers: states and names, against torch and the libraries' own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.question.question import question_of
from simulator.analytical.estimates import estimate_plans
from simulator.config.adapter import Adapter
from simulator.config.hf_config import load_model
from simulator.config.optimizers import OPTIMIZERS, TENSOR_S, canonical_optimizer, why_no_optimizer
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from simulator.kernels.roofline import Roofline
from simulator.memory.estimate import with_replay
from simulator.step.update import update_bytes, update_rate
from topology.catalog.clusters import cluster
from topology.catalog.gpus import gpu_kind


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("adamw_bnb_8bit", "adamw8bit"),
        ("bitsandbytes.optim.PagedAdamW8bit".rpartition(".")[2], "pagedadamw8bit"),
        ("paged_adamw_32bit", "pagedadamw"),
        ("FusedAdam", "adam"),
        ("Adafactor", "adafactor"),
        ("dist_muon", "muon"),
    ],
)
def test_words_of_libraries_are_known(word: str, name: str) -> None:
    assert canonical_optimizer(word) == name
    assert not why_no_optimizer(name)


def test_what_is_not_modelled_is_refused_by_its_name_and_reason() -> None:
    assert "has no cost here" in why_no_optimizer("distributedshampoo")


@pytest.mark.parametrize(
    ("name", "nbytes"), [("adamw", 8.0), ("adamw8bit", 2 * 260 / 256), ("lion", 4.0), ("sgd", 0.0), ("adafactor", 0.0)]
)
def test_states_of_a_float32_parameter(name: str, nbytes: float) -> None:
    """Two moments of four bytes; in 8 bits a byte each, and four for a block of 256."""
    model, plan = load_model("llama3.2-1b"), Plan()
    asked = question_of(
        model,
        cluster("dgx-h100", gpus=1),
        Workload(seq_len=1024, global_batch_size=1),
        framework="pytorch",
        runtime=Runtime(name="pytorch", optimizer=name),
        gpus=1,
    )
    table = estimate_plans(asked, [plan])

    assert table.memory.categories["optimizer"][0, 0] == pytest.approx(nbytes * model.parameters)
    assert table.breakdown_s["optimizer"][0] > 0


def test_fewer_states_move_less() -> None:
    moved = {name: one.moved(4.0) for name, one in OPTIMIZERS.items()}

    assert moved["sgd"] < moved["adamw8bit"] < moved["lion"] < moved["adamw"]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("adamw", lambda torch, p: torch.optim.AdamW(p)),
        ("sgd", lambda torch, p: torch.optim.SGD(p, lr=0.1)),
        ("sgdmomentum", lambda torch, p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adafactor", lambda torch, p: torch.optim.Adafactor(p)),
    ],
)
def test_states_are_those_that_torch_keeps(name: str, made) -> None:
    """Of one matrix, in numbers of its own type; Adafactor's row and column are next to nothing."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.randn(256, 512))
    optimizer = made(torch, [weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = sum(v.numel() for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.numel() > 1)

    assert OPTIMIZERS[name].state_bytes(4.0) * weight.numel() == pytest.approx(4 * kept, abs=4 * (256 + 512))


@pytest.mark.parametrize(("model", "seconds"), [("llama3.2-1b", 0.0395), ("llama3-8b", 0.2317)])
def test_an_8_bit_update_takes_its_arithmetic(model: str, seconds: float) -> None:
    """Measured of whole models on an H200 (examples/validation/savers.md); memory alone would take a fifth."""
    context = question_of(
        load_model(model),
        cluster("h200x4", gpus=1),
        Workload(seq_len=4096, global_batch_size=1),
        framework="transformers",
        runtime=Runtime(name="transformers", param_dtype="bfloat16", reduce_dtype="bfloat16", optimizer="adamw8bit"),
    )
    found = context.estimate([Plan()]).estimate(0).breakdown_s["optimizer"]
    assert found == pytest.approx(seconds, rel=0.12)


def test_adapters_in_float32_have_gradients_and_moments_in_it() -> None:
    """Those of peft (autocast_adapter_dtype), over weights in 16 bits: 4 and 8 bytes of each number."""
    model, rank = load_model("llama3.2-1b"), 32
    numbers = model.layers * rank * (model.hidden + model.heads * model.head_dim) * 2  # of queries and outputs
    found = {}
    for name in ("transformers", "pytorch"):
        adapter = Adapter(rank=rank, target_modules=("q_proj", "o_proj"))
        runtime = Runtime(name=name, param_dtype="bfloat16", reduce_dtype="bfloat16", adapter=adapter)
        asked = question_of(
            model,
            cluster("dgx-h100", gpus=1),
            Workload(seq_len=1024, global_batch_size=1),
            framework="pytorch",
            runtime=runtime,
        )
        found[name] = asked.estimate([Plan()]).memory.categories
    for kind, wide in (("gradients", 4), ("optimizer", 8)):
        assert found["transformers"][kind][0, 0] == pytest.approx(numbers * wide, rel=1e-3)
        assert found["pytorch"][kind][0, 0] == pytest.approx(numbers * wide / 2, rel=1e-3)
    more = found["transformers"]["parameters"][0, 0] - found["pytorch"]["parameters"][0, 0]
    assert more == pytest.approx(2 * numbers, rel=1e-3)


@pytest.mark.parametrize(("model", "tensors"), [("llama3.2-1b", 146), ("llama3-8b", 291)])
def test_bitsandbytes_waits_after_every_tensor(model: str, tensors: int) -> None:
    """Of which the library has 146 and 291; torchao's, which updates DTensors, does not wait."""
    host = {}
    for name in ("adamw", "adamw8bit"):
        for ranks in (1, 2):
            asked = question_of(
                load_model(model),
                cluster("dgx-h100", gpus=ranks),
                Workload(seq_len=4096, global_batch_size=ranks),
                framework="transformers",
                runtime=Runtime(name="transformers", param_dtype="bfloat16", reduce_dtype="bfloat16", optimizer=name),
            )
            plan = Plan(dp_shard=ranks, recompute="full")
            found = [asked.estimate([plan]).estimate(0), asked.simulate(plan).estimate]
            host[name, ranks] = found[0].breakdown_s["host"]
            assert found[0].step_s.value == pytest.approx(found[1].step_s.value, rel=0.01)
    assert host["adamw8bit", 1] - host["adamw", 1] == pytest.approx(tensors * TENSOR_S, rel=0.05)
    assert host["adamw8bit", 2] - host["adamw", 2] == pytest.approx(0.0, abs=TENSOR_S)


@pytest.mark.parametrize(
    ("name", "adapter", "plan", "seq_len", "allocated"),
    [
        ("llama3.2-1b", None, Plan(micro_batch_size=2), 4096, 34471484416),
        ("llama3.2-1b", Adapter(rank=64, dropout=0.1), Plan(micro_batch_size=2), 4096, 33849677824),
        ("llama3-8b", Adapter(rank=16), Plan(micro_batch_size=4, recompute="full"), 2048, 31522121728),
        ("llama3-8b", Adapter(rank=16, dropout=0.05), Plan(), 2048, 36643432448),
    ],
)
def test_memory_of_transformers_and_peft(name, adapter, plan, seq_len, allocated) -> None:
    """What torch had allocated at most on an H200 (tests/bench/peft_steps.py): the logits' gradient in 16 bits is there
    when only the one in float32 is left.
    """
    adapter = adapter and replace(adapter, target_modules=("all-linear",))
    asked = question_of(
        load_model(name),
        cluster("h200x4", gpus=1),
        Workload(seq_len=seq_len, global_batch_size=plan.micro_batch_size),
        framework="transformers",
        runtime=Runtime(name="transformers", param_dtype="bfloat16", reduce_dtype="bfloat16", adapter=adapter),
    )
    found = with_replay(asked, plan, asked.estimate([plan]).estimate(0)).memory
    assert found.peak_bytes.value == pytest.approx(allocated, rel=0.01)


def test_lora_that_runs_layers_again_keeps_no_copies_of_frozen_weights() -> None:
    """8B, 2 x 4,096 tokens: 39.97 GiB allocated at most on an H200 (examples/validation/savers.md)."""
    asked = question_of(
        load_model("llama3-8b"),
        cluster("h200x4", gpus=1),
        Workload(seq_len=4096, global_batch_size=2),
        framework="meshwright",
        runtime=Runtime(name="meshwright", adapter=Adapter(rank=16, target_modules=("all-linear",))),
    )
    found = asked.estimate([Plan(micro_batch_size=2, recompute="full")]).estimate(0)
    assert found.memory.peak_bytes.value == pytest.approx(39.97 * 2**30, rel=0.02)


@pytest.mark.parametrize(
    ("runtime", "dtype", "seconds"),
    [
        ("torchtitan", "float32", 8.17e-12 + 3.4e-12),
        ("pytorch", "float32", 22.1e-12 + 3.4e-12),
        ("torchtitan", "bfloat16", 5.39e-12 + 2.2e-12),
        ("pytorch", "bfloat16", 13.55e-12 + 2.2e-12),
    ],
)
def test_updates_of_one_kernel_and_of_one_an_operator_take_what_they_took(runtime: str, dtype: str, seconds: float):
    """AdamW and clipping of 218 million parameters in nine tensors on one H200, a parameter (torch 2.11, fused and
    foreach; examples/validation/kernels.md).
    """
    asked, roofline = Runtime(name=runtime, param_dtype=dtype), Roofline(gpu=gpu_kind("h200-sxm"))

    assert update_bytes(asked, 1.0, 0.0) / update_rate(asked, roofline) == pytest.approx(seconds, rel=0.12)
