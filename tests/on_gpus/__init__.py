"""Everything that needs GPUs as one command, `tests/on_gpus.sh`, and the table that is kept of it."""
