"""The Program: the instructions of every rank on named streams, without costs; and the Trace of a run.

It knows no plan and no model; may import only the modules at the top of `topology`.
"""
