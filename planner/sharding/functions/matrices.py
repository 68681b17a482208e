"""The product of two matrices, or of stacks of them."""

from __future__ import annotations

from planner.sharding.formulas.axis_flow import AxisFlow, NotUnderstood, Value


def product_of_matrices(flow: AxisFlow, left: Value, right: Value) -> Value:
    """Return `left @ right`."""
    if not left.dims or not right.dims:
        raise NotUnderstood("a product of matrices without dims")
    over = flow.unify(left.dims[-1], right.dims[-2] if len(right.dims) > 1 else right.dims[0], "a product of matrices")
    pending = flow.pending_of_product([left, right], "the product")
    if len(right.dims) == 1:
        return flow.contract([over], Value(left.dims[:-1], pending), "sum", "a product of matrices")
    batch = flow.broadcast([left.dims[:-2], right.dims[:-2]], "a product of matrices")
    rows = left.dims[-2:-1] if len(left.dims) > 1 else ()
    return flow.contract([over], Value((*batch, *rows, right.dims[-1]), pending), "sum", "a product of matrices")
