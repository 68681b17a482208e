"""What a tensor-parallel product and its collective take when they run at the same time.

May import `config`, `columns`, `kernels` and `collectives`.
"""
