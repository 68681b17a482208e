"""Measured costs for plans: operators, collectives, overlap, contention and a runtime's own costs.

A `Calibration` is made once, by `fitting`, and handed down. May import `config`, `columns`, `kernels`, `runtimes`,
`collectives` and `overlap`.
"""
