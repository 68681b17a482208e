"""One description of a pass of a block: the operators of a runtime under many plans at once, as typed steps.

`steps` are the types, `block` says which operators run and run again and makes the passes of a block, `pairing` joins
what runs at the same time. The account folds the steps of all plans (`simulator.analytical.layer_cost`), the Program
of one plan takes a row of them (`simulator.lowering.block_code`), and the allocator's replay follows the tensors of the
operators that run (`simulator.memory`).
"""
