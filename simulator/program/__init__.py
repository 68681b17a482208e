"""The Program: what every rank does, as instructions on named streams, without any cost; and the Trace of a run.

Knows no plan and no model: may import the modules at the top of `topology` only.
"""
