"""Routed experts as instructions: tokens to the ranks of their experts, the work of experts, and the results back.

    route.plan      who sends how many rows to whom, and in which order they stand: numbers of rows and of places
    route.send      rows of this rank's tokens to the ranks of their experts, in the order of experts there
    routed.*, ...   the operators between, on the rows that came
    route.back      and back, in the order of pairs

The number of rows of a rank is known only when the program runs. Buffers have the sizes of pieces before the exchange;
those after it are equal if all experts have the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec

from planner.sharding.backends.works import Work, Writer
from planner.sharding.ops.aten import Statement
from planner.sharding.plans.plan import OperatorStep
from simulator.sharded.graph import tensors_in
from simulator.sharded.program import ROUTE, Buffer, Kernel


def write_routed(
    out: Writer, step: OperatorStep, statement: Statement, operands: Mapping[str, str], result: str
) -> None:
    """Write the instructions of a node made by `frontends/routes.py`; `operands` are buffers by tensor."""
    ids, by_expert, by_token, others, body, last = statement.args
    pairs, matrices = out.buffers[operands[ids["tensor"]]], out.buffers[operands[by_expert[0]["tensor"]]]
    given = {"axes": [axis for axis in matrices.dims[0] if isinstance(axis, str)]}
    plan = _rows(out, f"{result}.route", pairs, pairs.shape[:1], "i64")
    made = Kernel(op=f"{ROUTE}plan", args=({"tensor": operands[ids["tensor"]]}, matrices.shape[0]), kwargs=given)
    out.add(Work(do=made, reads=(operands[ids["tensor"]],), writes=(plan,)))
    local = {f"w{n}": operands[one["tensor"]] for n, one in enumerate(by_expert)}
    local |= {f"p{n}": operands[one["tensor"]] for n, one in enumerate(others)} | {"ends": plan}
    for number, (one, every) in enumerate(by_token):
        source = operands[one["tensor"]]
        about = out.buffers[source]
        name = _rows(out, f"{result}.sent{number}", pairs, (*pairs.shape[:1], *about.shape[1:]), about.dtype)
        do = Kernel(op=f"{ROUTE}send", args=({"tensor": source}, {"tensor": plan}, every), kwargs=given)
        out.add(Work(do=do, reads=(source, plan), writes=(name,)))
        local[f"u{number}"] = name
    total = sum(_products(line, out, local) for line in body)
    for line in body:
        share = _products(line, out, local) / total if total else 0.0
        name = _rows(out, f"{result}.{line['name']}", pairs, line["shape"], line["dtype"])
        args = tuple(_bound(one, local) for one in line["args"])
        do = Kernel(op=line["op"], args=args, kwargs=_bound(line["kwargs"], local), index=line["index"])
        reads = tensors_in([*args, *do.kwargs.values()])
        out.add(Work(do=do, reads=reads, writes=(name,), step=step if share else None, share=share or 1.0))
        local[line["name"]] = name
    do = Kernel(op=f"{ROUTE}back", args=({"tensor": local[last]}, {"tensor": plan}), kwargs=given)
    out.add(Work(do=do, reads=(local[last], plan), writes=(result,)))


def _rows(out: Writer, name: str, like: Buffer, shape: Any, dtype: str) -> str:
    """Add a buffer with a row for each pair; ranks have as many pairs as rows of `like`."""
    spare = [()] * (len(shape) - 1)
    local = (like.local[0], *shape[1:])
    about = msgspec.structs.replace(
        like, tensor=name, shape=tuple(shape), dims=(like.dims[0], *spare), local=local, dtype=dtype
    )
    return out.add_buffer(name, about)


def _products(line: Mapping[str, Any], out: Writer, local: Mapping[str, str]) -> int:
    """Return the products of a row in a line of the body."""
    return prod(out.buffers[local[line["args"][1]["local"]]].local[1:]) if line["op"] == "routed.product" else 0


def _bound(value: Any, local: Mapping[str, str]) -> Any:
    """Return arguments with names of the body replaced by buffers."""
    if isinstance(value, dict):
        return (
            {"tensor": local[value["local"]]}
            if "local" in value
            else {key: _bound(one, local) for key, one in value.items()}
        )
    return [_bound(one, local) for one in value] if isinstance(value, list | tuple) else value
