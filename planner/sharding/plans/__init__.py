"""The answer in program order: as a value, as a program of the simulator, as JSON, and with the reason for each
exchange.

May import all folders of `planner.sharding` but `backends/` and `frontends/`.
"""
