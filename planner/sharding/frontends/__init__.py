"""What a user may hand the sharding compiler, as a sharding case: operators with annotations, placements, pins.

rules.py        ATen operators as formulas with annotations, and what a rank computes for each
captured.py     a captured graph as a sharding case
axis_maps.py    names for the dims of a captured graph; maps from names to mesh axes for parameters and compute
did.py          nvFuser's notation: logical axes, their splits, DIDx and DIDy
"""
