"""Bytes by axis and link, against bytes counted by hand from what the frameworks do."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from planner.explain import traffic as counting
from planner.explain.traffic import traffic_of
from planner.question.cases import case_from_flags
from planner.question.flags import Flags
from simulator.lowering.training import lower_training, sent_bytes
from simulator.program.program import Collective, Copy, Send

GB = 1e9


def asked(plan, *, model="llama3-8b", gpus=16, batch=16, seq=4096, framework="torchtitan", **runtime):
    flags = Flags(
        model=model,
        cluster="dgx-h100",
        gpus=(gpus,),
        seq_len=seq,
        global_batch=batch,
        runtime={"name": framework, **runtime},
        plan={"micro_batch_size": 1, "recompute": "none", **plan},
    )
    return case_from_flags(flags)


def sent(case):
    """Return the traffic of a case by axis, and by link."""
    found = traffic_of(case.question, case.plan, case.question.estimate([case.plan]).estimate(0))
    assert found is not None, case.question.problems(case.plan)
    return {axis.axis: axis for axis in found.axes}, {link.link: link for link in found.links}


def test_full_sharding_moves_three_times_the_parameters():
    """FSDP2: gathered in bfloat16 forward and backward (the head once: it is used again at once), and gradients
    scattered in float32; of a ring of 16 over two nodes, every node sends once into the network.
    """
    case = asked({"dp_shard": 16})
    axes, links = sent(case)
    parameters, head = case.question.model.parameters, 128256 * 4096
    whole = ((2 * parameters - head) * 2 + parameters * 4) * 15 / 16

    assert axes["fsdp"].sent_bytes == pytest.approx(whole, rel=1e-3)
    assert axes["fsdp"].network_bytes == pytest.approx(whole * 2 / 16, rel=1e-3)
    assert links["network"].mean_bytes == pytest.approx(whole / 8, rel=1e-3)
    assert links["network"].total_bytes == pytest.approx(whole * 2, rel=1e-3)


def test_replicas_of_shards_send_only_shards_of_gradients_between_nodes():
    """HSDP, shards inside a node: the network carries a sum of 1/8 of the gradients over two nodes, NVLink the rest."""
    sharded, _ = sent(asked({"dp_shard": 16}))
    case = asked({"dp_shard": 8, "dp_replicate": 2})
    axes, _ = sent(case)

    assert axes["replicate"].network_bytes == pytest.approx(
        case.question.model.parameters * 4 / 8 * 2 * 1 / 2, rel=1e-3
    )
    assert axes["fsdp"].network_bytes == 0
    assert axes["replicate"].network_bytes < 0.6 * sharded["fsdp"].network_bytes


@pytest.mark.parametrize(("framework", "batch"), [("torchtitan", 2), ("torchtitan", 16), ("megatron-lm", 16)])
def test_tensor_parallelism_moves_the_hidden_state_eight_times_a_layer(framework, batch):
    """With sequence parallelism an all-gather and a reduce-scatter around attention and around the MLP, both ways
    (Korthikanti et al., arXiv 2205.05198, section 4.2.2); embedding and head have one each way.
    """
    case = asked({"tp": 8, "sequence_parallel": True}, batch=batch, framework=framework)
    axes, _ = sent(case)
    hidden_bytes = 4096 * 4096 * 2  # tokens x width in bfloat16
    micro_batches = batch / 2

    assert axes["tp"].network_bytes == 0
    assert axes["tp"].sent_bytes == pytest.approx((32 * 8 + 4) * hidden_bytes * 7 / 8 * micro_batches, rel=0.02)


def test_a_pipeline_sends_one_hidden_state_a_boundary_each_way():
    """Four stages have three boundaries: activations forward, gradients backward, for every micro batch."""
    case = asked({"pp": 4, "tp": 4, "dp_shard": 1}, batch=8, framework="megatron-lm", seq=2048)
    axes, _ = sent(case)
    message = 2048 * 4096 * 2 / 4  # tokens x width in bfloat16, scattered over tensor-parallel ranks

    assert axes["pp"].sent_bytes == pytest.approx(2 * 8 * message * 3 / 4, rel=0.01)
    # Stages of four GPUs: two on a node, so one boundary of the three crosses the network.
    assert axes["pp"].network_bytes == pytest.approx(2 * 8 * message * 1 / 4, rel=0.01)


def test_experts_get_and_return_their_tokens():
    """Dispatch and combine, forward and backward: each token's hidden state to its two experts, of which 7 in 8 are
    away.
    """
    case = asked({"ep": 8, "dp_shard": 16}, model="mixtral-8x7b", batch=16)
    axes, _ = sent(case)

    assert axes["ep"].sent_bytes == pytest.approx(32 * 4 * 4096 * 2 * 4096 * 2 * 7 / 8, rel=0.02)
    assert axes["ep"].network_bytes == 0


@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        ({"dp_shard": 16}, 96),
        ({"dp_shard": 16, "reshard_after_forward": False}, 96),
        ({"pp": 4, "dp_shard": 4, "reshard_after_forward": True}, 48),
        ({"pp": 4, "virtual_stages": 2, "tp": 2, "dp_shard": 2}, 24),
        ({"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble", "dp_shard": 8}, 64),
        ({"pp": 4, "virtual_stages": 2, "schedule": "DualPipeV", "dp_shard": 4}, 48),
        ({"cp": 2, "dp_shard": 8, "cp_method": "ring"}, 64),
    ],
)
def test_further_micro_batches_add_the_same_bytes(monkeypatch, plan, batch):
    """Counted on few micro batches and continued is as counted on the whole step."""
    case = asked(plan, batch=batch, seq=2048)
    short = sent(case)
    monkeypatch.setattr(counting, "FEW", 1 << 20)

    assert short[0].keys() == sent(case)[0].keys()
    for axis, whole in sent(case)[0].items():
        assert short[0][axis].sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-9)
        assert short[0][axis].network_bytes == pytest.approx(whole.network_bytes, rel=1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 4, "virtual_stages": 2, "schedule": "InterleavedZeroBubble", "dp_shard": 4, "recompute": "full"},
        {"tp": 2, "cp": 2, "cp_method": "ring", "dp_shard": 4, "tp_overlap": "async"},
    ],
)
def test_what_is_counted_is_what_the_step_sends(plan):
    """Collectives, messages and copies of every rank are those of the program that is simulated, but for copies within
    the GPU.
    """
    case = asked(plan, batch=16, seq=2048, compile=True)
    whole, (few,) = lower_training(case.question, case.plan), sent_bytes(case.question, case.plan, [4])

    def sending(code):
        kept = (one for one in code.instructions if isinstance(one, (Collective, Send, Copy)))
        kept = (
            one for one in kept if not isinstance(one, Copy) or (one.kind, one.nbytes) not in whole.costs.own_copies
        )
        return Counter((type(one), one.nbytes, getattr(one, "group", ""), getattr(one, "op", "")) for one in kept)

    assert len(few.program.codes) == len(whole.program.codes)
    for one, other in zip(few.program.codes, whole.program.codes, strict=True):
        assert one.ranks == other.ranks
        assert sending(one) == sending(other)
        assert len(one.instructions) == sending(one).total() > 0


def test_overlap_moves_the_same_bytes():
    plain = asked({"tp": 8}, compile=True)
    hidden = replace(plain, plan=plain.plan.with_(tp_overlap="async"))

    assert sent(plain)[0]["tp"].sent_bytes == sent(hidden)[0]["tp"].sent_bytes


def test_without_nvlink_bytes_cross_pcie():
    flags = Flags(model="llama3-8b", cluster="l40s-x8", gpus=(8,), seq_len=2048, global_batch=8, plan={"dp_shard": 8})
    case = case_from_flags(flags)
    _, links = sent(case)

    assert set(links) == {"pcie"}
    assert links["pcie"].busy_share > 0.1


def test_documents_of_suggest_and_estimate_have_the_traffic_that_explain_has(planner, tmp_path):
    nodes = {"gpu": "h100-sxm", "gpus_per_node": 1, "nodes": 2, "interconnect": "nvswitch", "nic_gbit_per_gpu": 400}
    (tmp_path / "cluster.json").write_text(json.dumps(nodes))
    small = ("--model", "llama3.2-1b", "--cluster", tmp_path / "cluster.json", "--seq-len", 4096, "--global-batch", 8)
    found = json.loads(
        planner("suggest", *small, "--tp", 2, "--pp", 1, "--json", "--out", tmp_path / "plan.json").stdout
    )
    estimated = json.loads(planner("estimate", "--plan", tmp_path / "plan.json", "--json").stdout)
    quick = ("--no-flips",)
    explained = json.loads(planner("explain", tmp_path / "plan.json", *quick, "--json").stdout)
    flags = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", 16, "--seq-len", 4096, "--global-batch", 64)
    away = json.loads(planner("estimate", *flags, "--offload", "parameters", "--micro-batch", 1, "--json").stdout)
    links = {link["link"]: link for link in found["plans"][0]["traffic"]["links"]}

    assert found["plans"][0]["traffic"]["axes"] == estimated["traffic"]["axes"] == explained["traffic"]["axes"]
    assert links["network"]["busy_share"] > 0
    assert {axis["axis"] for axis in away["traffic"]["axes"]} >= {"fsdp", "host"}
    # In 4 micro batches a gradient goes to the host, and parameters come before both passes; but the head's only before
    # one, as it is used again at once. All in float32, 1/16 of it each.
    host = next(axis for axis in away["traffic"]["axes"] if axis["axis"] == "host")
    assert host["pcie_bytes"] == pytest.approx(4 * 4 * (3 * 8.03e9 - 128256 * 4096) / 16, rel=1e-3)
