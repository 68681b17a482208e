"""The data of a sharded computation that planner and executor exchange: a captured graph, and the program made from it.

Both are JSON data. The executor captures a graph from a module, the planner places its tensors and writes a program,
the executor runs that program and the simulator times it. Imports `simulator.program`, `simulator.config` and
`topology`.
"""
