"""What planner and executor hand each other of a sharded computation: a captured graph, and the program made of it.

Both are JSON data. The executor captures a graph from a module, the planner places its tensors and writes a program,
the executor runs that program and the simulator times it. Imports `simulator.program`, `simulator.config` and
`topology`.
"""
