"""The commands, one a file: parse, ask, print. `planner.cli` loads one when it is asked for.

May import every other package of `planner`; nothing but the command line imports this one.
"""
