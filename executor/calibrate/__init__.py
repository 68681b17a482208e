"""Measurements for a profile: operators, contention, overlap, layers of a runtime.

May import `measure`, `parallel`, `overlap`, `model`, `kernels`, `gpu` and `launch`, `topology` and `simulator`.
"""
