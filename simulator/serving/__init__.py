"""How fast a model serves: one forward pass of an engine, its KV cache, and requests that arrive, wait and are
answered.

`deployment` is what is decided, `traffic` what arrives, `engine` how the software schedules, `forward_pass` what a step
costs, `kv_cache` what fits, `server` runs requests through all of them on SimPy, `latency` sums up what they saw. May
import `config`, `columns`, `kernels` and `collectives`.
"""
