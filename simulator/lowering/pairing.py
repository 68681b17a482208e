"""Which kernels and collectives of a block run beside each other, joined into single steps.

Our own modes: every gather with the products that read what it gathers, every scatter with those whose results add up to
what it scatters, as the closed form pairs them (`simulator.overlap.site_costs`). They are moved next to each other, as the executor
runs them. torch's graph pass takes what is next to a collective only (`simulator.overlap.torch_async`).
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.lowering.steps import AsyncStep, KernelStep, SiteStep, Step, TransferStep, summed
from simulator.overlap.site_costs import SITE_MODES, Products, pair_issue_s, pair_s, parts_of
from simulator.overlap.torch_async import ASYNC
from simulator.program.cost_model import Cost
from simulator.step.context import CostContext

# --- modes of the executor ------------------------------------------------------------------------------------------


def site_pairs(steps: list[Step], context: CostContext) -> list[Step]:
    """Join collectives of sites with their products, in the steps of one pass."""
    out: list[Step] = []
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if not isinstance(step, TransferStep) or step.mode not in SITE_MODES:
            out.append(step)
            continue
        beside = Products()
        if step.op == "all_gather":
            end = next((n for n in range(position, len(steps)) if _ends(steps[n], step)), len(steps))
            products = [s for s in steps[position:end] if _reads(s, step)]
            steps[position:end] = [s for s in steps[position:end] if not _reads(s, step)]
        else:
            first = next((n for n in range(len(out), 0, -1) if _ends(out[n - 1], step)), 0)
            products = [s for s in out[first:] if _gives(s, step)]
            out[first:] = [s for s in out[first:] if not _gives(s, step)]
            weight_s = sum(s.cost.seconds for s in out[first:] if isinstance(s, KernelStep) and s.weight)
            beside = Products(weight_s=weight_s)
        out.append(_site(products, beside, step, context) if products else step)  # type: ignore[arg-type]  # kernels alone pass
    return out


def _ends(step: Step, transfer: TransferStep) -> bool:
    """Whether a step is another collective of the same ranks: products beyond it belong to that one."""
    if isinstance(step, (SiteStep, AsyncStep)):
        step = step.transfer
    return isinstance(step, TransferStep) and step.group == transfer.group


def _reads(step: Step, gather: TransferStep) -> bool:
    return isinstance(step, KernelStep) and step.product is not None and step.reads == gather.tensor


def _gives(step: Step, scatter: TransferStep) -> bool:
    return isinstance(step, KernelStep) and step.product is not None and step.result == scatter.tensor


def _site(kernels: Sequence[KernelStep], products: Products, transfer: TransferStep, context: CostContext) -> SiteStep:
    for kernel in kernels:
        if kernel.product is not None:
            products = products.merged(kernel.product)
    op, mode, ranks = transfer.op, transfer.mode, float(transfer.ranks)
    size = context.table["tp"] * 0 + transfer.whole_bytes
    whole = context.groups.time_s(op, "tp", size)
    parts = parts_of(op, products, whole, size, context.groups, context.roofline, context.table["tp"])
    regathers = op == "reduce_scatter" and transfer.backward
    seconds = float(pair_s(mode, op, parts, products, regathers=regathers, site=context.site)[0])
    host = float(pair_issue_s(mode, op, ranks, regathers=regathers, site=context.site))
    alone = summed(kernels, "+".join(kernel.key[0] for kernel in kernels))
    moved = alone.cost.seconds * alone.cost.hbm_bytes_per_s
    _, shape, dtype = alone.key
    kernel = KernelStep(
        key=(f"{alone.key[0]} {mode} {op}", (*shape, transfer.nbytes), dtype),
        cost=Cost(seconds=seconds, sms=alone.cost.sms, hbm_bytes_per_s=moved / seconds if seconds else 0.0),
        host_s=min(host, context.spec.host.launch_s),
    )
    return SiteStep(kernel=kernel, transfer=transfer, more_host_s=host - kernel.host_s)


# --- torch's graph pass ---------------------------------------------------------------------------------------------


def async_pairs(steps: list[Step], name: str) -> list[Step]:
    """Join collectives with the products next to them, as torch's graph pass does."""
    out: list[Step] = []
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if not isinstance(step, TransferStep) or step.mode != ASYNC or step.op == "all_reduce":
            out.append(step)
            continue
        partners: list[KernelStep] = []
        earlier = tuple(out)
        gathers = step.op == "all_gather"
        if gathers:
            while position < len(steps) and _joins(steps[position], partners, step):
                partners.append(steps[position])  # type: ignore[arg-type]  # _joins lets only kernels through
                position += 1
        else:
            while out and isinstance(leader := out[-1], KernelStep) and leader.pieces_s:
                partners.insert(0, leader)
                out.pop()
        joined = [p for p in partners if not p.weight]
        apart = [p for p in partners if p.weight]
        if not any(p.pieces_s for p in joined) or (not gathers and _terms(earlier, step) != 1):
            out += [step, *partners] if gathers else [*partners, step]
            continue
        together = AsyncStep(product=summed(joined, f"{name}.{step.op}.{len(out)}"), transfer=step, gathers=gathers)
        out += [together, *apart] if gathers else [*apart, together]
        if step.adding is not None:
            out.append(KernelStep(key=("add_partials", (step.nbytes,), step.group), cost=step.adding, host_s=0.0))
    return out


def _terms(steps: Sequence[Step], transfer: TransferStep) -> int:
    """Return how many products since the last collective add up to what `transfer` reduces."""
    count = 0
    for step in reversed(steps):
        if isinstance(step, (AsyncStep, SiteStep)) or (isinstance(step, TransferStep) and step.group == transfer.group):
            break
        count += isinstance(step, KernelStep) and step.result == transfer.tensor
    return count


def _joins(step: Step, partners: Sequence[KernelStep], gather: TransferStep) -> bool:
    """Whether a step belongs to the products behind a gather: all up to the first that is none, after one has come."""
    if not isinstance(step, KernelStep):
        return False
    if step.pieces_s and not step.weight and step.reads != gather.tensor:
        return not any(p.pieces_s and not p.weight for p in partners)
    return bool(step.pieces_s) or not any(p.pieces_s for p in partners)
