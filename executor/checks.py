"""Right before fast: everything that is compared before the first step is timed, in order, with what it found."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from executor.heartbeat import Heartbeat
from executor.legal import cp_method
from executor.meshes import Meshes
from executor.parallelize import DTYPES, autocast_type
from executor.records import Recorder, finite
from executor.request import Request
from executor.verify import shrink, small_plan, small_workload, verify
from executor.verify_kernels import KernelVerdict, check_experts, check_ring
from executor.verify_types import differences, verify_types
from topology import codec

EXACT = "float64"


def check_numbers(request: Request, meshes: Meshes, device: torch.device, recorder: Recorder, beat: Heartbeat) -> bool:
    """Compare the plan with one process, record what was found, and return whether it is right on every rank."""
    plan, runtime = request.plan, request.runtime
    small, short = shrink(request.model, plan), small_workload(plan, request.workload)
    settings = {"device": device, "seed": request.seed, "own_table": request.own_table}
    exact = runtime.compute_dtype == EXACT
    beat.enter("verifying the plan's numbers")
    wide = replace(
        runtime, param_dtype=EXACT, compute_dtype=EXACT, reduce_dtype=EXACT, compile=exact and runtime.compile
    )
    verdict = verify(small_plan(plan), small, short, wide, meshes, **settings)
    recorder.write(
        "verified",
        ok=verdict.ok,
        dtype=EXACT,
        differs_from_timed=differences(request.model, small, runtime),
        **finite(codec.to_builtins(verdict)),
    )
    ok = verdict.ok
    if ok and not exact:
        beat.enter("verifying the plan's numbers in its types")
        types = verify_types(small_plan(plan), small, short, runtime, meshes, **settings)
        recorder.write("verified_types", ok=types.ok, **finite(codec.to_builtins(types)))
        ok = types.ok
    beat.enter("verifying kernels")
    for kernel in _check_kernels(request, meshes, device):
        recorder.write("kernel", ok=kernel.ok, **finite(codec.to_builtins(kernel)))
        ok = ok and kernel.ok
    # The timed model has other sizes. What was compiled for these would be recompiled for sizes unknown, and slower.
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # noqa: SLF001 - what is compiled from here on is counted for the report
    return ok


def _check_kernels(request: Request, meshes: Meshes, device: torch.device) -> list[KernelVerdict]:
    """Compare what the plan uses in its own type; float32 and wider have been compared with the whole plan."""
    dtype = DTYPES[request.runtime.compute_dtype]
    found = []
    method = cp_method(request.plan, request.runtime)
    if dtype.itemsize < 4 and request.plan.cp > 1 and method != "all_to_all":  # which runs the kernel of one rank
        found.append(check_ring(meshes.group("cp"), device=device, dtype=dtype, method=method))
    if dtype.itemsize < 4 and request.model.moe is not None:
        autocast = autocast_type(request.plan, request.runtime) is not None
        found.append(check_experts(device=device, dtype=dtype, autocast=autocast))
    # All ranks must stop together, so that none is left in a collective.
    worst = torch.tensor(float(any(not kernel.ok for kernel in found)), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if worst.item() and all(kernel.ok for kernel in found):
        found.append(KernelVerdict(name="another rank's", dtype="", difference=float("inf"), tolerance=0.0))
    return found
