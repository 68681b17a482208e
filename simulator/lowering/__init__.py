"""From a plan to a Program: what every rank does in one training step, and one plan simulated.

`block_code` turns a block's operators into kernels and collectives, `network` makes stages of blocks, `training` writes
the step, `machine_costs` prices its instructions, `simulation` runs it. May import every package but `fitting` and
`legality`.
"""
