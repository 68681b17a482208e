"""What a search asks of thousands of plans: what no step can beat, and the few that are worth their whole cost.

May import what `analytical` may, and `analytical`.
"""
