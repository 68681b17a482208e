"""Passes of a block as typed steps: the operators that a runtime runs, for many plans at once.

`steps` has the types, `block` decides which operators run or run again and makes the passes, `pairing` joins steps that
run at the same time. The analytical model adds up the steps of all plans (`simulator.analytical.layer_cost`), the
Program of one plan takes a row of them (`simulator.lowering.block_code`), and the allocator's replay follows the
tensors of the operators that run (`simulator.memory`).
"""
