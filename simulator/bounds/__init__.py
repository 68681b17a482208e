"""Lower bounds of step time and memory for thousands of plans, and the screening that selects the few to be costed in
full.

May import what `analytical` may, and `analytical`.
"""
