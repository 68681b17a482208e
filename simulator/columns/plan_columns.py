"""Plans as a struct of arrays: the form in which candidates are enumerated, checked by rules and costed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from simulator.config.plan import PLAN_FIELDS, Plan
from simulator.config.plan_schema import Kind, PlanField

_DTYPES: dict[Kind, type] = {Kind.COUNT: np.int64, Kind.NUMBER: np.float64, Kind.SWITCH: np.bool_, Kind.WORD: np.str_}
# The value that a column has for None, by kind of field.
_NONE: dict[Kind, Any] = {Kind.COUNT: -1, Kind.NUMBER: 0.0, Kind.SWITCH: -1, Kind.WORD: ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanColumns:
    """Plans as columns: an array of shape (plans,) for each of `PLAN_FIELDS` that is not a list. None is stored as -1
    in columns of whole numbers and of switches (0 or 1), as 0 in columns of numbers, as "" in columns of words.

    `listed` marks plans that spell out their layers per stage. The lists themselves, recomputation per stage and
    placement are not carried: a caller that needs them keeps the plans too. `placing` is the index in
    `topology.rates.orders.node_orders` of the order that every node's GPUs have, -1 for none in particular.
    """

    dp_replicate: NDArray[np.int64]
    dp_shard: NDArray[np.int64]
    zero_stage: NDArray[np.int64]
    tp: NDArray[np.int64]
    sequence_parallel: NDArray[np.bool_]
    cp: NDArray[np.int64]
    pp: NDArray[np.int64]
    ep: NDArray[np.int64]
    etp: NDArray[np.int64]
    virtual_stages: NDArray[np.int64]
    schedule: NDArray[np.str_]
    micro_batch_size: NDArray[np.int64]
    recompute: NDArray[np.str_]
    tp_overlap: NDArray[np.str_]
    reshard_after_forward: NDArray[np.int64]
    cp_method: NDArray[np.str_]
    capacity_factor: NDArray[np.float64]
    offload: NDArray[np.str_]
    offload_layers: NDArray[np.int64]
    ep_overlap: NDArray[np.str_]
    fsdp_exchange: NDArray[np.str_]
    listed: NDArray[np.bool_]
    placing: NDArray[np.int64]

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

    def rounds(self, global_batch_size: int) -> NDArray[np.int64]:
        """Micro batches per step, rounded down where the batch does not divide (a rule of its own reports that)."""
        return np.asarray(global_batch_size // (self.dp * self.micro_batch_size), dtype=np.int64)

    def take(self, which: Any) -> Self:
        """Return the rows that `which` (a mask, indices or a slice) selects."""
        rows = rows_of(which)
        return type(self)(**{f.name: taken(getattr(self, f.name), rows) for f in fields(self)})

    def plan(self, row: int) -> Plan:
        """Return one row as a Plan."""
        return Plan(**{name: _value(known, getattr(self, name)[row]) for name, known in CARRIED.items()})


# The fields of a plan that are stored as columns.
CARRIED = {name: known for name, known in PLAN_FIELDS.items() if not known.kind.listed}
if missing := set(CARRIED) - {one.name for one in fields(PlanColumns)}:
    raise TypeError(f"PlanColumns has no column for {', '.join(sorted(missing))}, which plans have")


def plan_columns(plans: Sequence[Plan]) -> PlanColumns:
    """Return plans as columns, without their lists."""
    return PlanColumns(
        **{name: _column(known, [getattr(plan, name) for plan in plans]) for name, known in CARRIED.items()},
        listed=np.array([bool(plan.layers_per_stage) for plan in plans], dtype=np.bool_),
        placing=np.full(len(plans), -1, dtype=np.int64),
    )


def columns_with(count: int, **given: NDArray[Any]) -> PlanColumns:
    """Return `count` plans with the columns that are `given`, and every other field at its default."""
    rest = {name: np.broadcast_to(_column(known, [known.default]), (count,)) for name, known in CARRIED.items()}
    rest |= {"listed": np.zeros(count, dtype=np.bool_), "placing": np.full(count, -1, dtype=np.int64)}
    return PlanColumns(**{**rest, **given})


def _column(known: PlanField, values: Sequence[Any]) -> NDArray[Any]:
    dtype = np.int64 if known.optional and known.kind is Kind.SWITCH else _DTYPES[known.kind]
    return np.array([_NONE[known.kind] if value is None else value for value in values], dtype=dtype)


def _value(known: PlanField, coded: Any) -> Any:
    value = coded.item()
    if known.optional and value == _NONE[known.kind]:
        return None
    return bool(value) if known.kind is Kind.SWITCH else value


def _is_one_value(column: NDArray[Any]) -> bool:
    """Return whether a column is one value broadcast to all rows."""
    return column.strides == (0,)


def rows_of(which: Any) -> slice | NDArray[np.intp]:
    """Return what `which` (a mask, indices or a slice) selects as indices or a slice: several columns need a mask's
    indices once.
    """
    if isinstance(which, slice):
        return which
    chosen = np.asarray(which)
    return np.nonzero(chosen)[0] if chosen.dtype == np.bool_ else chosen.astype(np.intp, copy=False)


def taken(column: NDArray[Any], rows: slice | NDArray[np.intp]) -> NDArray[Any]:
    """Return some rows of a column, as `rows_of` gives them."""
    if isinstance(rows, slice):
        return column[rows]  # one value for all rows remains so
    # `take` is faster than an index, of words above all.
    return np.broadcast_to(column[:1], rows.shape) if _is_one_value(column) else column.take(rows, axis=0)


def words(column: NDArray[np.str_]) -> tuple[str, ...]:
    """Return the distinct words of a column that has few, in alphabetical order; faster than sorting the column."""
    found, rest = [], column[:1] if _is_one_value(column) else column
    while len(rest):
        found.append(str(rest[0]))
        rest = rest[rest != rest[0]]
    return tuple(sorted(found))


def concatenate(parts: Sequence[PlanColumns]) -> PlanColumns:
    """Return the rows of several sets of plans, one after the other."""
    return PlanColumns(**{f.name: _together([getattr(part, f.name) for part in parts]) for f in fields(PlanColumns)})


def _together(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if all(_is_one_value(column) for column in columns) and len({column[:1].tobytes() for column in columns}) == 1:
        return np.broadcast_to(columns[0][:1], (sum(map(len, columns)),))
    return np.concatenate(columns)


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return (the first row of each distinct combination, the index of every row's combination).

    Column by column with integer codes: sorting rows as records takes ten times as long.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        if _is_one_value(column) or (column == column[:1]).all():  # as most are; faster than sorting
            continue
        count, of_row = _numbered(column)
        # Renumbered after each column, so that codes stay below the square of the number of rows.
        code = _numbered(code * count + of_row)[1]
    count, which = _numbered(code)
    rows = np.empty(count, dtype=np.intp)
    rows[which[::-1]] = np.arange(len(which))[::-1]  # assigned last, the first row of each combination is the one kept
    return rows, which


def _numbered(column: NDArray[Any]) -> tuple[int, NDArray[np.intp]]:
    """Return the number of distinct values, and the rank of every row's value among them.

    Whole numbers in a small range are ranked by counting, which takes a tenth of the time of sorting.
    """
    whole = column
    if column.dtype.kind == "f" and np.isfinite(column).all():
        whole = column.astype(np.int64)
    if whole.dtype.kind in "iu" and len(whole) and (whole is column or (whole == column).all()):
        low = whole.min()
        span = int(whole.max()) - int(low) + 1
        if span <= 2 * len(whole):
            there = np.zeros(span, dtype=np.bool_)
            there[whole - low] = True
            places = np.cumsum(there) - 1
            return int(places[-1]) + 1, places[whole - low]
    values, of_row = np.unique(column, return_inverse=True)
    return len(values), of_row.reshape(-1)
