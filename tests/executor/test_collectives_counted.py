"""Collectives of a layer: as many in the executor's own passes as its description has, by kind."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - torch comes first
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402 - as above
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - as above

from executor.parallel.meshes import build_meshes  # noqa: E402 - as above
from executor.parallel.parallelize import Setup  # noqa: E402 - as above
from executor.parallel.train_step import Trainer  # noqa: E402 - as above
from simulator.analytical.scenario import Scenario  # noqa: E402 - as above
from simulator.config.model import MixtureOfExperts, Model  # noqa: E402 - as above
from simulator.config.plan import Plan  # noqa: E402 - as above
from simulator.config.runtime import Runtime  # noqa: E402 - as above
from simulator.config.workload import Workload  # noqa: E402 - as above
from simulator.lowering.training import lower_training  # noqa: E402 - as above
from simulator.program.program import Collective  # noqa: E402 - as above
from topology.catalog.cluster_file import load_cluster  # noqa: E402 - as above
from topology.catalog.platform import take_gpus  # noqa: E402 - as above

OURS = Runtime(name="meshwright", param_dtype="float32", compute_dtype="bfloat16", reduce_dtype="float32")
EXPERTS = MixtureOfExperts(experts=4, experts_per_token=2, ffn=32)
KINDS = {
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
TP = Plan(tp=2, sequence_parallel=True)


class Counted(TorchDispatchMode):
    """Counts calls of collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in {"c10d", "_c10d_functional"}:
            kinds = [kind for name, kind in KINDS.items() if name in function.name()]
            self.found.update(kinds[:1])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def model_of(layers: int, moe: MixtureOfExperts | None) -> Model:
    return Model(
        name="tiny", family="x", layers=layers, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=64, vocab=64, moe=moe
    )


def of_a_layer(count) -> dict[str, int]:
    return dict(count(3) - count(2))


@pytest.mark.parametrize(
    ("plan", "moe"),
    [
        (TP, None),
        (TP, EXPERTS),
        (TP.with_(ep=2), EXPERTS),
        (Plan(dp_shard=2, ep=2), EXPERTS),
        (Plan(dp_shard=2), None),
        (Plan(dp_shard=2, reshard_after_forward=False), None),
    ],
    ids=["tp", "experts under tp", "experts under tp and ep", "experts under ep", "fsdp", "fsdp that stays gathered"],
)
def test_a_layer_has_the_collectives_that_are_described(two_ranks, plan: Plan, moe: MixtureOfExperts | None) -> None:
    workload = Workload(seq_len=16, global_batch_size=plan.data_parallel)
    machine = take_gpus(load_cluster("h200x4"), 2)

    def ran(layers: int) -> Counter[str]:
        trainer = Trainer(
            Setup(
                plan=plan,
                model=model_of(layers, moe),
                workload=workload,
                runtime=OURS,
                meshes=build_meshes(plan, "cpu"),
                device=torch.device("cpu"),
            )
        )
        trainer.backward(0)
        with Counted() as counted:
            trainer.backward(0)
        return counted.found

    def described(layers: int) -> Counter[str]:
        scenario = Scenario(model=model_of(layers, moe), cluster=machine, workload=workload, runtime=OURS)
        code = lower_training(scenario, plan).program.codes[0]
        return Counter(one.op for one in code.instructions if isinstance(one, Collective))

    assert of_a_layer(ran) == of_a_layer(described)
