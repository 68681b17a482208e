"""Lower a plan to a Program, the instructions of every rank in one training step, and simulate it.

`block_code` turns a block's operators into kernels and collectives, `code_rank` what ranks issue, `training` writes
the step, `machine_costs` has the costs of its instructions, `simulation` runs it. May import every package but
`fitting` and `legality`.
"""
