"""A Llama-like decoder that serves: paged KV cache, captured steps, tensor parallelism, requests that arrive.

`request` is the format of a request, `worker` one rank that measures it, and `run` starts the ranks; `decoder` and
`operators` are the model's forward pass, `cache` its keys and values, `engine` the sequences that it continues,
`mixed_step` the inputs of steps that read prompts; `steps` and `load` measure, `check` compares with the training
decoder on one process.
"""
