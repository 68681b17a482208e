"""Replay of the memory that one rank allocates in a step, tensor by tensor, through a model of torch's caching
allocator.

`tensors` has the allocations of a block's passes in the order of its operators; `rank` runs the step of one pipeline
rank as its host does; `replay` joins them for a plan, with the allocator of `simulator.memory.allocator`; `estimate`
puts the result into a plan's estimate.
"""
