"""Whether a framework can run a plan: the capabilities of each framework as data, and the rules that read them. The
planner applies the rules to columns of candidates, the executor to the plan that it is to run.

May import `config`, `columns`, `runtimes` and `pipeline`.
"""
