"""Serving: the forward pass of an engine, its KV cache, and requests that arrive, wait and are answered.

`deployment` is the serving plan, `traffic` the requests, `engine` the software's scheduler, `forward_pass` the cost of
a step, `kv_cache` the memory; `server` runs requests through all of them on SimPy, and `latency` summarises what
clients saw. May import `config`, `columns`, `kernels` and `collectives`.
"""
