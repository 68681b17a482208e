"""The operations of one training step, described once: the analytical model counts them, the lowering writes them as
instructions.

`units` are the blocks of a rank's stages, `traffic` is data-parallel communication, and `walk` issues everything to a
`Rank` in the order of its host. May import `columns`, `kernels`, `collectives`, `overlap`, `runtimes`, `pipeline` and
`calibration`.
"""
