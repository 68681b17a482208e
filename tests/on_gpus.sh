#!/bin/sh
# Everything that needs a GPU, in the order of what a person would miss most: sh tests/on_gpus.sh OUT [--budget 900]
# The same command continues where it was cut short. CONTRIBUTING.md says what is in it and where its table is kept.
set -eu
cd "$(dirname "$0")/.."
# NVLink multicast stays off: in virtual machines and on shared hosts it can hang the fabric.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m tests.on_gpus run "$@"
