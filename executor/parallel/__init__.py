"""Apply a plan to the decoder, one module per kind of parallelism, and run optimizer steps under it.

May import `model`, `overlap`, `kernels`, `gpu` and `launch`, `topology` and `simulator`.
"""
