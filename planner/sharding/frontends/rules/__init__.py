"""ATen operators as formulas of the compiler's own functions, and the kernel that a rank runs for each.

One function a family of operators; `table.py` says which. What a formula does along axes is known to
`planner.sharding.functions`; only functions that have no rule there (`statement.ANNOTATED`) carry an annotation. An operator
that no rule knows is *opaque*: its operands and its result are needed whole, which is right for any operator and shards none.
"""
