#SBATCH --nodes=32
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
srun torchrun --nnodes=32 --nproc_per_node=8 \
  -m torchtitan.train \
  --module llama3 --config llama3_70b
