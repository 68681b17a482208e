"""Check that a plan computes the same as one process, before it is timed.

The reference is the same decoder without any parallelism, run on every rank with the whole batch, from the same seed.
Compared are the loss and gradient norm of each step, every gradient of the first step and every parameter after the
last; each rank compares its own shards, so nothing is gathered.

Differences are relative: |a - b| over the largest |b| of that tensor. Plans sum in different orders, so they agree up
to rounding: the tolerance is 2^10 units in the last place of the compute type (a sum over ranks, blocks or keys costs a
few units, which a few layers multiply), and twenty times that for parameters, because AdamW divides a gradient by its
own magnitude.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn import functional

from executor.model.adapters import train_only
from executor.model.decoder import STD, Decoder, init_weights
from executor.model.shards import ParameterShard, local_shard, local_tensor
from executor.parallel.parallelize import Setup
from executor.parallel.train_step import CLIP, LEARNING_RATE, Trainer, rank_batch
from simulator.config.adapter import Adapter
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.workload import Workload

STEPS = 2
UNITS = 2.0**10
PARAMETER_UNITS = 20 * UNITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Largest relative differences over all ranks, steps and tensors, and the tensor with the worst gradient.

    A difference that is NaN (one side is infinite or NaN) counts as infinite.
    """

    loss: float
    gradient_norm: float
    gradient: float
    parameter: float
    worst: str
    tolerance: float
    parameter_tolerance: float
    compared: int  # tensors compared, over all ranks

    @property
    def ok(self) -> bool:
        small = max(self.loss, self.gradient_norm, self.gradient) <= self.tolerance
        return small and self.parameter <= self.parameter_tolerance and self.compared > 0


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of one process. `gradients` are those of the first step, `parameters` those after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def verify(setup: Setup, *, fault: float = 0.0) -> Verdict:
    """Run `STEPS` steps of the plan and of one process, and compare; a collective call, same result on all ranks.

    The runtime must store parameters in its compute type. `fault` scales the first rank's gradients by 1 + fault before
    they are compared, to test the check itself.
    """
    trainer = Trainer(setup)
    if trainer.in_backward is not None:
        trainer.in_backward.keeps = True
    _, dtype, _ = setup.dtypes
    wanted = run_one_process(
        setup.model,
        setup.workload,
        device=setup.device,
        seed=setup.seed,
        drawn=dtype,
        store=dtype,
        compute=dtype,
        adapter=setup.runtime.adapter,
        clip=trainer.in_backward is None,
    )
    loss = norm = worst_gradient = worst_parameter = 0.0
    worst, compared = "", 0
    for step in range(STEPS):
        part = trainer.backward(step)
        if step == 0:
            if fault and dist.get_rank() == 0:
                for parameter in trainer.parameters():
                    if parameter.grad is not None:
                        local_tensor(parameter.grad).mul_(1 + fault)
            for name, parameter in trainer.named_parameters():
                if not parameter.requires_grad:
                    continue
                difference = relative_difference(
                    trainer.gradient(name, parameter), wanted.gradients[name], trainer.parameter_shards.get(name)
                )
                compared += 1
                if not difference <= worst_gradient:
                    worst_gradient, worst = difference, name
        found = float(trainer.update())
        norm = nan_max(norm, abs(found - wanted.norms[step]) / wanted.norms[step])
        loss = nan_max(loss, abs(trainer.total_loss(part) - wanted.losses[step]) / wanted.losses[step])
    for name, parameter in trainer.named_parameters():
        # A bias starts at zero and is as large as its updates, which AdamW makes equally large for tiny gradients, so
        # its difference is relative to the size of weights (STD) at least.
        difference = relative_difference(
            parameter.detach(), wanted.parameters[name], trainer.parameter_shards.get(name), least=STD
        )
        worst_parameter = nan_max(worst_parameter, difference)
    # NaN does not compare, so it counts as infinity.
    mine = torch.tensor([loss, norm, worst_gradient, worst_parameter], dtype=torch.float64, device=setup.device)
    mine = mine.nan_to_num(torch.inf, torch.inf, torch.inf)
    named: list[tuple[float, str, int]] = [(0.0, "", 0)] * dist.get_world_size()
    dist.all_gather_object(named, (float(mine[2]), worst, compared))
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    unit = torch.finfo(dtype).eps
    return Verdict(
        loss=float(mine[0]),
        gradient_norm=float(mine[1]),
        gradient=float(mine[2]),
        parameter=float(mine[3]),
        worst=max(named)[1],
        tolerance=UNITS * unit,
        parameter_tolerance=PARAMETER_UNITS * unit,
        compared=sum(entry[2] for entry in named),
    )


def nan_max(a: float, b: float) -> float:
    """Return the larger of two numbers; NaN is larger than all."""
    return b if not b <= a else a


def relative_difference(
    part: torch.Tensor | None, whole: torch.Tensor, shard: ParameterShard | None = None, *, least: float = 1e-30
) -> float:
    """Return the largest difference between this rank's part and the same part of `whole`, over the largest |whole|.

    `least` is the smallest denominator.
    """
    if part is None:
        return float("inf")
    mine, theirs = local_tensor(part), local_shard(whole, part, shard)
    if mine.shape != theirs.shape:
        return float("inf")
    if not mine.numel():
        return 0.0
    return float((mine.double() - theirs.double()).abs().max() / whole.double().abs().max().clamp(min=least))


def run_one_process(
    model: Model,
    workload: Workload,
    *,
    device: torch.device,
    seed: int,
    drawn: torch.dtype,
    store: torch.dtype,
    compute: torch.dtype,
    adapter: Adapter | None,
    steps: int = STEPS,
    clip: bool = True,
) -> Reference:
    """Run steps on one process with torch's own functions and our decoder, batches and initial weights.

    Weights are drawn in the type `drawn`, stored in `store` (as wide or wider), and used in `compute`.
    """
    with torch.device("meta"):
        whole = train_only(Decoder(model), model, adapter).to(drawn)
    whole.to_empty(device=device)
    whole.tie()
    init_weights(whole, seed=seed)
    whole.to(store)
    whole.set_positions(torch.arange(workload.seq_len, device=device), compute)
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms, first = [], [], {}
    for step in range(steps):
        tokens, targets = rank_batch(Plan(), workload, vocab=model.vocab, step=step, seed=seed, data_rank=0, cp_rank=0)
        with torch.autocast(device.type, dtype=compute) if compute is not store else nullcontext():
            logits = whole(tokens.to(device))
        wide = torch.promote_types(logits.dtype, torch.float32)
        loss = functional.cross_entropy(logits.flatten(0, 1).to(wide), targets.to(device).flatten())
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP if clip else torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return Reference(losses, norms, first, {name: p.detach() for name, p in whole.named_parameters()})


# --- a model small enough to be verified ------------------------------------------------------------------------------


def small_model(model: Model, plan: Plan) -> Model:
    """Return a small model of the same kind on which `plan` is legal, with as many layers as stages, but at
    least two.
    """
    heads = model.heads // model.kv_heads
    # Context parallelism by all-to-all divides heads: each of its ranks needs a key-value head.
    kv_heads = plan.tp * max(1, plan.cp, min(2, model.kv_heads // plan.tp))
    stages = plan.stages
    layers = max(2, stages)
    if plan.layers_per_stage:
        layers = len(plan.layers_per_stage)
    moe = model.moe
    if moe is not None:
        experts = max(plan.ep, min(moe.experts, 8 if 8 % plan.ep == 0 else plan.ep))
        dense = min(model.dense_layers, 1)
        moe = replace(
            moe,
            experts=experts,
            experts_per_token=min(2, moe.experts_per_token, experts),
            ffn=32 * plan.tp,
            shared_ffn=32 * plan.tp if moe.shared_ffn else 0,
            dense_layers=dense,
            dense_layer_ids=tuple(range(dense)) if moe.dense_layer_ids else (),
        )
    latent = model.latent
    if latent is not None:
        latent = replace(
            latent,
            q_lora_rank=min(latent.q_lora_rank, 24),
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        )
        kv_heads, heads = plan.tp * max(2, plan.cp), 1
    sliding = layers if model.windowed_layers == model.layers else min(model.windowed_layers, 1)
    return replace(
        model,
        latent=latent,
        sliding_window=min(model.sliding_window, 8),
        sliding_layers=tuple(range(sliding)),
        layers=layers,
        hidden=64,
        heads=kv_heads * min(heads, 4),
        kv_heads=kv_heads,
        head_dim=16,
        ffn=64 * plan.tp,
        vocab=128 * plan.tp,
        moe=moe,
    )


def small_plan(plan: Plan) -> Plan:
    """Return the plan for a small model: the same, but with one layer per stage and no placement."""
    return plan.with_(layers_per_stage=(1,) * plan.stages if plan.pp > 1 else (), placement=())


def small_workload(plan: Plan, workload: Workload) -> Workload:
    """Return a short batch on which the plan is legal, with as many micro batches as the workload, up to 2 pp v."""
    multiple = plan.tp * 2 * plan.cp
    rounds = workload.global_batch_size // (plan.data_parallel * plan.micro_batch_size)
    if plan.pp > 1:
        most = 2 * plan.stages
        rounds = next((n for n in range(most, plan.pp - 1, -1) if n <= rounds and n % plan.pp == 0), min(rounds, most))
    else:
        rounds = min(rounds, 2)
    return replace(
        workload,
        seq_len=max(multiple, 32 // multiple * multiple),
        global_batch_size=plan.data_parallel * plan.micro_batch_size * rounds,
    )
