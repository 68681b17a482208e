"""What one rank asks of torch's caching allocator in a step, tensor by tensor, and what that allocator then holds.

`tensors` is what a pass of a block allocates and frees, in the order of its operators; `rank` is the step of one
pipeline rank as its host runs it; `replay` puts them together for a plan, with the allocator of
`simulator.memory.allocator`; `estimate` puts what was found into a plan's estimate.
"""
