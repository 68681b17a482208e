"""The stages of one pipeline: assign layers and recompute modes to them with CP-SAT, after bounds have pruned the
options.

May import `plan_space`, `question` and the packages below it.
"""
