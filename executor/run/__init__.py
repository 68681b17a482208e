"""Run a plan on real devices: start ranks, check numbers, time steps, and read back which settings took effect.

May import every other folder of `executor`, `topology` and `simulator`.
"""
