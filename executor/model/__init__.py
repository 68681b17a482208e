"""A Llama-like decoder built from the shapes of a `Model`. Parallelism is applied to it from outside (`parallel`).

May import `launch`, `gpu` and `kernels`, `topology` and `simulator`.
"""
