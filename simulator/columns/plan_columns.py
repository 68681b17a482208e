"""Plans as a struct of arrays: the form in which candidates are enumerated, judged by rules and costed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanColumns:
    """One entry a plan. A ZeRO stage of -1, a schedule or a context-parallel method of "" mean None.

    `reshard` is -1 for the runtime's default, else 0 or 1; `capacity_factor` is 0 for dropless experts. `listed` marks
    plans that spell out their layers per stage. The lists themselves, recomputation per stage and placement are not
    carried: who needs them keeps the plans beside the columns. `placing` is which of `topology.rates.orders.node_orders` the
    GPUs of every node have, -1 for none in particular.
    """

    dp_replicate: NDArray[np.int64]
    dp_shard: NDArray[np.int64]
    zero_stage: NDArray[np.int64]
    tp: NDArray[np.int64]
    sequence_parallel: NDArray[np.bool_]
    cp: NDArray[np.int64]
    pp: NDArray[np.int64]
    ep: NDArray[np.int64]
    virtual_stages: NDArray[np.int64]
    schedule: NDArray[np.str_]
    micro_batch_size: NDArray[np.int64]
    recompute: NDArray[np.str_]
    tp_overlap: NDArray[np.str_]
    cp_method: NDArray[np.str_]
    reshard: NDArray[np.int64]
    capacity_factor: NDArray[np.float64]
    listed: NDArray[np.bool_]
    placing: NDArray[np.int64]
    offload: NDArray[np.str_]
    ep_overlap: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> NDArray[np.int64]:
        return self.dp_replicate * self.dp_shard

    @property
    def gpus(self) -> NDArray[np.int64]:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def stages(self) -> NDArray[np.int64]:
        return self.pp * self.virtual_stages

    def micro_batches(self, global_batch_size: int) -> NDArray[np.int64]:
        """Micro batches a step, rounded down where they do not divide (another rule's business)."""
        return np.asarray(global_batch_size // (self.dp * self.micro_batch_size), dtype=np.int64)

    def take(self, which: Any) -> PlanColumns:
        """Return the rows that `which` (a mask, indices or a slice) selects."""
        return PlanColumns(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def plan(self, row: int) -> Plan:
        """Return one row as a Plan."""
        reshard = int(self.reshard[row])
        zero = int(self.zero_stage[row])
        return Plan(
            dp_replicate=int(self.dp_replicate[row]),
            dp_shard=int(self.dp_shard[row]),
            zero_stage=None if zero < 0 else zero,
            tp=int(self.tp[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            cp=int(self.cp[row]),
            pp=int(self.pp[row]),
            ep=int(self.ep[row]),
            virtual_stages=int(self.virtual_stages[row]),
            schedule=str(self.schedule[row]) or None,
            micro_batch_size=int(self.micro_batch_size[row]),
            recompute=str(self.recompute[row]),
            tp_overlap=str(self.tp_overlap[row]),
            cp_method=str(self.cp_method[row]) or None,
            reshard_after_forward=None if reshard < 0 else bool(reshard),
            capacity_factor=float(self.capacity_factor[row]) or None,
            offload=str(self.offload[row]),
            ep_overlap=str(self.ep_overlap[row]),
        )


def plan_columns(plans: Sequence[Plan]) -> PlanColumns:
    """Return plans as columns; what columns do not carry stays behind."""

    def integers(name: str) -> NDArray[np.int64]:
        return np.array([int(getattr(plan, name)) for plan in plans], dtype=np.int64)

    def strings(name: str) -> NDArray[np.str_]:
        return np.array([str(getattr(plan, name) or "") for plan in plans], dtype=np.str_)

    return PlanColumns(
        dp_replicate=integers("dp_replicate"),
        dp_shard=integers("dp_shard"),
        zero_stage=np.array([-1 if p.zero_stage is None else p.zero_stage for p in plans], dtype=np.int64),
        tp=integers("tp"),
        sequence_parallel=np.array([p.sequence_parallel for p in plans], dtype=np.bool_),
        cp=integers("cp"),
        pp=integers("pp"),
        ep=integers("ep"),
        virtual_stages=integers("virtual_stages"),
        schedule=strings("schedule"),
        micro_batch_size=integers("micro_batch_size"),
        recompute=strings("recompute"),
        tp_overlap=strings("tp_overlap"),
        cp_method=strings("cp_method"),
        reshard=np.array([-1 if (r := p.reshard_after_forward) is None else int(r) for p in plans], dtype=np.int64),
        capacity_factor=np.array([p.capacity_factor or 0.0 for p in plans], dtype=np.float64),
        listed=np.array([bool(p.layers_per_stage) for p in plans], dtype=np.bool_),
        placing=np.full(len(plans), -1, dtype=np.int64),
        offload=strings("offload"),
        ep_overlap=strings("ep_overlap"),
    )


def words(column: NDArray[np.str_]) -> tuple[str, ...]:
    """Return the different words of a column of few, in alphabetical order: sooner than by sorting them all."""
    found, rest = [], column
    while len(rest):
        found.append(str(rest[0]))
        rest = rest[rest != rest[0]]
    return tuple(sorted(found))


def concatenate(parts: Sequence[PlanColumns]) -> PlanColumns:
    """Return the rows of several columns, one after the other."""
    return PlanColumns(
        **{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(PlanColumns)}
    )


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (one row of each distinct combination, which of those every row equals).

    Column by column with integer codes: sorting rows as records takes ten times as long.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        if (column == column[:1]).all():  # as most are, of few plans: sooner seen than by sorting
            continue
        values, of_row = np.unique(column, return_inverse=True)
        # Renumbered after each column, so that codes stay below the square of the number of rows.
        code = np.unique(code * len(values) + of_row.reshape(-1), return_inverse=True)[1].reshape(-1)
    _, rows, which = np.unique(code, return_index=True, return_inverse=True)
    return rows, which.reshape(-1)
