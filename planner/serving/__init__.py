"""Which deployment serves a model best: legal ones listed, all simulated, ranked by what was asked.

May import `simulator` and `topology`; the command `suggest --task serve` asks it.
"""
