"""May this plan run, in this framework? What each framework can express as data, and the rules that read it.

The planner asks about columns of candidates, the executor about the one plan it is to run: both read the same lines.
May import `config`, `columns`, `runtimes` and `pipeline`.
"""
