"""Numerical checks before anything is timed: plans, kernels, types and overlap modes against one float64 process.

May import `parallel`, `overlap`, `model`, `kernels`, `gpu` and `launch`, `topology` and `simulator`.
"""
