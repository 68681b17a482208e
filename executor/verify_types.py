"""The plan exactly as it will be timed, its types and its compilation included, on a small model.

`executor.verify` compares in float64, where rounding hides nothing. That leaves out what narrow types and the compiler
bring: casts by FSDP or autocast, kernels of half precision, fused code. So one step more is taken, built by the very
arguments of the timed run but for sizes, and compared with one process in float64 from the same weights.

How far may it be off? As far as rounding goes, and how far that is one process says: it takes the same step in the same
types, and its own distance from float64, tensor by tensor, is the measure. A plan rounds in other places (sums over
ranks, norms in the narrow type under FSDP), so eight times that distance is allowed, and four units in the last place
(of the loss, one).
A mistake of structure is 1 to 100 percent of a tensor; in bfloat16 one process is off by about 1 percent.

Routers turn rounding into other choices: a token whose second and third expert are nearly equal goes elsewhere, and
gradients of experts jump. There only the loss is compared, and `executor.verify_kernels` sees to the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.meshes import Meshes
from executor.parallelize import DTYPES
from executor.train_step import Trainer
from executor.verify import larger, one_process, relative
from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload

TIMES = 8.0
UNITS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TypesVerdict:
    """`gradient` is the relative difference of the tensor that used up most of what it was allowed, `allowed` that.

    `gradients_compared` is False for sparse models.
    """

    dtype: str
    compiled: bool
    loss: float
    loss_tolerance: float
    gradient: float
    allowed: float
    worst: str
    gradients_compared: bool

    @property
    def ok(self) -> bool:
        return self.loss <= self.loss_tolerance and (not self.gradients_compared or self.gradient <= self.allowed)


def verify_types(
    plan: Plan,
    model: Model,
    workload: Workload,
    runtime: Runtime,
    meshes: Meshes,
    *,
    device: torch.device,
    seed: int = 0,
    own_table: bool = False,
    fault: float = 0.0,
) -> TypesVerdict:
    """Take one step in the types of `runtime` and compare; a collective call, equal on all ranks.

    `fault` is as in `executor.verify`.
    """
    store, compute = DTYPES[runtime.param_dtype], DTYPES[runtime.compute_dtype]
    trainer = Trainer(plan, model, workload, runtime, meshes, device=device, seed=seed, own_table=own_table)
    one = {"device": device, "seed": seed, "drawn": store, "steps": 1}
    exact = one_process(model, workload, store=torch.float64, compute=torch.float64, **one)
    rounded = one_process(model, workload, store=store, compute=compute, **one)
    unit = torch.finfo(compute).eps

    true = exact.losses[0]
    loss = abs(trainer.total_loss(trainer.backward(0)) - true) / true
    used, difference, allowed, worst = 0.0, 0.0, 1.0, ""
    for name, parameter in trainer.named_parameters():
        if not parameter.requires_grad:
            continue
        if fault and dist.get_rank() == 0 and parameter.grad is not None:
            parameter.grad.mul_(1 + fault)
        found = relative(parameter.grad, exact.gradients[name], trainer.cuts.get(name))
        most = TIMES * relative(rounded.gradients[name], exact.gradients[name]) + UNITS * unit
        if not found / most <= used:
            used, difference, allowed, worst = found / most, found, most, name
    answers: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(answers, (_number(used), _number(loss), _number(difference), allowed, worst))
    top = max(answers)
    losses = 0.0
    for answer in answers:
        losses = larger(losses, answer[1])
    return TypesVerdict(
        dtype=runtime.compute_dtype,
        compiled=runtime.compile,
        loss=losses,
        loss_tolerance=TIMES * abs(rounded.losses[0] - true) / true + unit,
        gradient=top[2],
        allowed=top[3],
        worst=str(top[4]),
        gradients_compared=model.moe is None,
    )


def _number(value: float) -> float:
    """Not-a-number would win or lose a maximum by accident: it becomes infinity."""
    return value if value == value else float("inf")  # noqa: PLR0124 - only NaN differs from itself


def differences(model: Model, small: Model, runtime: Runtime) -> list[str]:
    """Return in words all that separates the two checks from the run that is timed."""
    sizes = " x ".join(f"{a} for {b}" for a, b in ((small.layers, model.layers), (small.hidden, model.hidden)))
    said = [f"a smaller model: {sizes} (layers x hidden), a vocabulary of {small.vocab} for {model.vocab}"]
    if runtime.compute_dtype != "float64":
        said.append(f"the exact check is in float64 and eager; in {runtime.compute_dtype} one step is compared")
        if model.moe is not None:
            said.append(
                f"in {runtime.compute_dtype} gradients are not compared: rounding changes which experts are chosen"
            )
    return said
