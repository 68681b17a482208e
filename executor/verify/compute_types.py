"""Check a plan with the types and compilation of the timed run, on a small model.

`executor.verify.plans` compares in float64, where rounding hides no error. That leaves out what half precision and the
compiler add: casts by FSDP or autocast, half-precision kernels, fused code. So one more step runs with the settings of
the timed run except for sizes, and is compared with one process in float64 from the same weights.

The tolerance comes from rounding: one process runs the same step in the same types, and its distance from float64 is
measured for each tensor. A plan rounds in other places (sums over ranks, norms in half precision under FSDP), so
ROUNDING_FACTOR times that distance is allowed, plus UNITS units in the last place (one for the loss). A structural
error changes a tensor by 1 to 100 percent; in bfloat16 one process differs by about 1 percent.

With a router, rounding changes which experts are chosen, and gradients of experts jump. There only the loss is
compared, and `executor.verify.kernels` checks the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from executor.overlap import mode_named
from executor.parallel.parallelize import Setup
from executor.parallel.train_step import Trainer
from executor.verify.plans import nan_max, relative_difference, run_one_process
from simulator.config.model import Model
from simulator.config.overlap_sites import executor_name, modes_in
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime

ROUNDING_FACTOR = 8.0
UNITS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TypesVerdict:
    """`gradient` is the relative difference of the tensor closest to its tolerance, `allowed`, and `worst` its name.

    `gradients_compared` is False for mixture-of-experts models.
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


def verify_types(setup: Setup, *, fault: float = 0.0) -> TypesVerdict:
    """Run one step in the types of the runtime and compare; a collective call, with the same result on all ranks.

    `fault` is as in `executor.verify.plans`.
    """
    model, workload, runtime = setup.model, setup.workload, setup.runtime
    store, compute, _ = setup.dtypes
    trainer = Trainer(setup)
    if trainer.in_backward is not None:
        trainer.in_backward.keeps = True
    one = partial(run_one_process, model, workload, device=setup.device, seed=setup.seed, adapter=runtime.adapter)
    run = partial(one, drawn=store, steps=1)
    exact, rounded = run(store=torch.float64, compute=torch.float64), run(store=store, compute=compute)
    unit = torch.finfo(compute).eps

    true = exact.losses[0]
    loss = abs(trainer.total_loss(trainer.backward(0)) - true) / true
    used, difference, allowed, worst = 0.0, 0.0, 1.0, ""
    for name, parameter in trainer.named_parameters():
        if not parameter.requires_grad:
            continue
        if fault and dist.get_rank() == 0 and parameter.grad is not None:
            parameter.grad.mul_(1 + fault)
        found = relative_difference(
            trainer.gradient(name, parameter), exact.gradients[name], trainer.parameter_shards.get(name)
        )
        most = ROUNDING_FACTOR * relative_difference(rounded.gradients[name], exact.gradients[name]) + UNITS * unit
        if not found / most <= used:
            used, difference, allowed, worst = found / most, found, most, name
    answers: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(answers, (_number(used), _number(loss), _number(difference), allowed, worst))
    top = max(answers)
    losses = 0.0
    for answer in answers:
        losses = nan_max(losses, answer[1])
    return TypesVerdict(
        dtype=runtime.compute_dtype,
        compiled=runtime.compile,
        loss=losses,
        loss_tolerance=ROUNDING_FACTOR * abs(rounded.losses[0] - true) / true + unit,
        gradient=top[2],
        allowed=top[3],
        worst=str(top[4]),
        gradients_compared=model.moe is None,
    )


def _number(value: float) -> float:
    """Return infinity for NaN, which compares with nothing."""
    return value if value == value else float("inf")  # noqa: PLR0124 - only NaN differs from itself


def differences(plan: Plan, model: Model, small: Model, runtime: Runtime) -> list[str]:
    """Return sentences on the differences between the two checks and the timed run."""
    sizes = " x ".join(f"{a} for {b}" for a, b in ((small.layers, model.layers), (small.hidden, model.hidden)))
    differences = [f"a smaller model: {sizes} (layers x hidden), a vocabulary of {small.vocab} for {model.vocab}"]
    if runtime.compute_dtype != "float64":
        differences.append(f"the exact check is in float64 and eager; in {runtime.compute_dtype} one step is compared")
        if model.moe is not None:
            differences.append(
                f"in {runtime.compute_dtype} gradients are not compared: rounding changes which experts are chosen"
            )
        narrow = [mode for mode in modes_in(plan.tp_overlap) if mode_named(executor_name(mode)).half_precision_only]
        differences += [
            f"in float64 {mode} exchanges as copy_engine and multiplies by the library:"
            " its kernels take half precision, in which each is compared on its own where GPUs run it"
            for mode in narrow
        ]
    return differences
