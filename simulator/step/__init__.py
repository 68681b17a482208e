"""What one training step does, described once: the analytical model counts it, the lowering writes it out.

`units` are the blocks of a rank's stages, `traffic` is what keeps data-parallel ranks in step, and `walk` tells a
`Rank` all of it in the order of its host. May import `columns`, `kernels`, `collectives`, `overlap`, `runtimes`,
`pipeline` and `calibration`.
"""
