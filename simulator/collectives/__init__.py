"""What a collective costs on the machine: which algorithm runs, for how long, and how sure we are.

May import `config` and `columns`.
"""
