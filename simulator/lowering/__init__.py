"""From a plan to a Program: what every rank does in one training step.

`block_code` turns a block's operators into kernels and collectives, `network` makes stages of blocks, `writing` turns
them into instructions, `sharded_data` adds data-parallel traffic, `training` writes the step around them, and
`machine_costs` says what each instruction costs on a cluster. All take their numbers from where the closed form takes
them, so the two can only differ in what waits for what.
"""
