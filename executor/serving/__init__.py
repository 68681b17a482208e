"""A Llama-like decoder that serves: paged KV cache, captured decode steps, tensor parallelism, requests that arrive.

`request` is what is asked, `worker` one rank that answers it and `run` what starts the ranks; `decoder` and `operators`
are the model's forward pass, `cache` its keys and values, `engine` the sequences that it goes on with; `steps` and
`load` measure, `check` compares with the training decoder on one process.
"""
