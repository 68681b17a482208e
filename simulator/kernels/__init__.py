"""What one operator is, and how long it takes on a GPU: formulas over named axes, and the roofline.

May import `config` and `columns`.
"""
