"""The stages of one pipeline: layers and recompute modes assigned to them, compared by the account of their steps,
after bounds have left out what cannot be the best.

May import `plan_space`, `question` and the packages below it.
"""
