"""What each command is asked, as one value: the command line, `planner --server`, the service and Python derive from
it.

May import `topology` and the tables of `simulator`; only `click_command.py` needs click.
"""
