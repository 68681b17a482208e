"""The stages of one pipeline: layers and recompute modes assigned to them, compared by the account of their steps,
after bounds have excluded assignments that cannot be the best.

May import `plan_space`, `question` and the packages below it.
"""
