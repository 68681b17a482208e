"""Run all numerical checks of a plan before its first step is timed, and record their results."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from executor.gpu.device import forget_compiled
from executor.launch.heartbeat import Heartbeat
from executor.launch.legal import cp_method
from executor.launch.records import Recorder, nonfinite_as_none
from executor.launch.request import Request
from executor.parallel.meshes import Meshes
from executor.parallel.parallelize import DTYPES, Setup, autocast_type
from executor.verify import overlap
from executor.verify.compute_types import differences, verify_types
from executor.verify.kernels import KernelVerdict, check_experts, check_ring
from executor.verify.plans import small_model, small_plan, small_workload, verify
from topology import codec

EXACT = "float64"


def check_numbers(request: Request, meshes: Meshes, device: torch.device, recorder: Recorder, beat: Heartbeat) -> bool:
    """Compare the plan with one process, record the results, and return whether it is correct on every rank."""
    plan, runtime = request.plan, request.runtime
    small, short = small_model(request.model, plan), small_workload(plan, request.workload)
    setup = Setup(
        plan=small_plan(plan),
        model=small,
        workload=short,
        runtime=runtime,
        meshes=meshes,
        device=device,
        seed=request.seed,
        own_table=request.own_table,
    )
    exact = runtime.compute_dtype == EXACT
    beat.set_phase("verifying the plan's numbers")
    wide = replace(
        runtime, param_dtype=EXACT, compute_dtype=EXACT, reduce_dtype=EXACT, compile=exact and runtime.compile
    )
    verdict = verify(replace(setup, runtime=wide, as_typed=runtime))
    recorder.write(
        "verified",
        ok=verdict.ok,
        dtype=EXACT,
        differs_from_timed=differences(plan, request.model, small, runtime),
        **nonfinite_as_none(codec.to_builtins(verdict)),
    )
    ok = verdict.ok
    if ok and not exact:
        beat.set_phase("verifying the plan's numbers in its types")
        types = verify_types(setup)
        recorder.write("verified_types", ok=types.ok, **nonfinite_as_none(codec.to_builtins(types)))
        ok = types.ok
    beat.set_phase("verifying kernels")
    for kernel in _check_kernels(request, meshes, device):
        recorder.write("kernel", ok=kernel.ok, **nonfinite_as_none(codec.to_builtins(kernel)))
        ok = ok and kernel.ok
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of the checks is not part of the plan's
    # The timed model has other sizes; without a reset it would be recompiled with dynamic shapes, which are slower.
    # What is compiled from here on is counted for the report.
    forget_compiled()
    return ok


def _check_kernels(request: Request, meshes: Meshes, device: torch.device) -> list[KernelVerdict]:
    """Compare the kernels that the plan uses in half precision; wider types are compared in the check of the plan."""
    dtype = DTYPES[request.runtime.activation_dtype]
    found = []
    method = cp_method(request.plan, request.runtime)
    if dtype.itemsize < 4 and request.plan.cp > 1 and method != "all_to_all":  # all_to_all runs one rank's kernel
        found.append(check_ring(meshes.group("cp"), device=device, dtype=dtype, method=method))
    if dtype.itemsize < 4 and request.model.moe is not None:
        autocast = autocast_type(request.plan, request.runtime) is not None
        found.append(check_experts(device=device, dtype=dtype, autocast=autocast))
    if dtype.itemsize < 4 and device.type == "cuda":  # on the CPU all modes use torch's products
        found += _check_overlap(request, meshes.group("tp"), device, dtype)
    # All ranks must stop together, so that none waits in a collective.
    worst = torch.tensor(float(any(not kernel.ok for kernel in found)), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() and all(kernel.ok for kernel in found):
        found.append(KernelVerdict(name="another rank's", dtype="", difference=float("inf"), tolerance=0.0))
    return found


def _check_overlap(
    request: Request, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> list[KernelVerdict]:
    """Compare the matmuls of each overlapped site with float64, in the plan's sizes; twice, once per buffer."""
    verdicts = (
        overlap.check(operation, mode, shape, group, device=device, dtype=dtype, iterations=2)
        for operation, mode, shape in overlap.planned(request.plan, request.model, request.workload)
    )
    return [
        KernelVerdict(
            name=f"{found.operation} {found.mode}",
            dtype=found.dtype,
            difference=found.difference,
            tolerance=found.tolerance,
        )
        for found in verdicts
    ]
