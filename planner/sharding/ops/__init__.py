"""The known operators, one family per file; each is one entry, and `table.py` lists them.

    annotation.py             formulas and annotations, parsed
    axis_flow.py, walker.py   a formula walked with axes in the place of numbers
    aten.py                   operators of PyTorch as they were captured, and statements made of them
    op.py                     what an entry says

An entry has the names in formulas, what the function does along axes, its derivative, the ATen operators that it
captures, and what their kernels save; how a kernel is run is in the executor's table, by the same names
(`executor/sharding/operations.py`).
"""
