"""Times of a tensor-parallel product and its collective that run at the same time.

May import `config`, `columns`, `kernels` and `collectives`.
"""
