"""What makes a schedule's table right, checked without time: and tables written by hand, as torch prints them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from simulator.pipeline.schedules.table import Action, Kind, Schedule
from topology.errors import BadInput, BadPlan

_SINGLE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def parse_action(text: str) -> Action:
    """Return the action that `text` names. Raises BadInput."""
    single = _SINGLE.fullmatch(text)
    if single:
        return Action(int(single[1]), Kind(single[2]), int(single[3]))
    pair = _PAIR.fullmatch(text)
    if pair:
        parts = (parse_action(pair[1]), parse_action(pair[2]))
        if parts[0].kind is Kind.FORWARD and parts[1].kind is Kind.BACKWARD:
            return Action(-1, Kind.OVERLAP, -1, parts)
    raise BadInput(
        f"{text!r} is not a pipeline action", remedy="write them like 2F0, 1B3, 0I2, 0W2 or (0F3;3B1)OVERLAP_F_B"
    )


def rows_of(schedule: Schedule) -> tuple[str, ...]:
    """Return one line per rank, actions separated by blanks."""
    return tuple(" ".join(map(str, row)) for row in schedule.table)


def schedule_from_rows(
    rows: Sequence[str] | Sequence[Iterable[Action]],
    *,
    name: str,
    stages_per_rank: int,
    micro_batches: int,
    v_shaped: bool = False,
) -> Schedule:
    """Return a schedule of one's own, checked. Raises BadPlan when it is incomplete or can never finish."""
    table = tuple(
        tuple(parse_action(word) for word in row.replace(",", " ").split()) if isinstance(row, str) else tuple(row)
        for row in rows
    )
    schedule = Schedule(
        name=name,
        ranks=len(table),
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        table=table,
        v_shaped=v_shaped,
    )
    problems = check_schedule(schedule)
    if problems:
        raise BadPlan(f"schedule {name} cannot run", why="; ".join(problems[:4]))
    return schedule


# --- what makes a table right -----------------------------------------------------------------------------------------


def dependencies(action: Action, stages: int) -> Iterator[Action]:
    """Yield what a single action needs besides its rank's turn: the F, B or I whose result it works on.

    A backward on the stage above may be split: then its input gradient is what counts, and I stands for both.
    """
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        if stage > 0:
            yield Action(stage - 1, Kind.FORWARD, micro_batch)
    elif action.kind is Kind.WEIGHT_GRAD:
        yield Action(stage, Kind.INPUT_GRAD, micro_batch)
    else:
        yield Action(stage, Kind.FORWARD, micro_batch)
        if stage < stages - 1:
            yield Action(stage + 1, Kind.INPUT_GRAD, micro_batch)


def check_schedule(schedule: Schedule) -> list[str]:
    """Return what is wrong with a table: actions missing, doubled or on the wrong rank, or a cycle of waits."""
    problems = []
    seen: dict[tuple[int, Kind, int], int] = {}
    for rank, row in enumerate(schedule.table):
        for action in (leaf for step in row for leaf in step.leaves):
            key = (action.stage, action.kind, action.micro_batch)
            if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.micro_batches):
                problems.append(f"{action} on rank {rank}: no such stage or micro batch")
            elif schedule.rank_of(action.stage) != rank:
                problems.append(
                    f"{action} stands on rank {rank}, its stage is on rank {schedule.rank_of(action.stage)}"
                )
            elif key in seen:
                problems.append(f"{action} stands there twice")
            seen[key] = rank
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            have = "".join(kind for kind in "FBIW" if (stage, Kind(kind), micro_batch) in seen)
            if have not in {"FB", "FIW"}:
                problems.append(f"stage {stage} has {have or 'nothing'} of micro batch {micro_batch}, not FB or FIW")
    return problems or _stuck(schedule)


def _stuck(schedule: Schedule) -> list[str]:
    """Run the table without time and return what each rank is stuck at."""
    done: set[Action] = set()
    at = [0] * schedule.ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.table):
            while at[rank] < len(row) and all(
                need in done for leaf in row[at[rank]].leaves for need in dependencies(leaf, schedule.stages)
            ):
                for leaf in row[at[rank]].leaves:
                    done.add(leaf)
                    if leaf.kind is Kind.BACKWARD:
                        done.add(Action(leaf.stage, Kind.INPUT_GRAD, leaf.micro_batch))
                at[rank] += 1
                progress = True
    return [
        f"rank {rank} waits for ever at {row[at[rank]]}"
        for rank, row in enumerate(schedule.table)
        if at[rank] < len(row)
    ]
