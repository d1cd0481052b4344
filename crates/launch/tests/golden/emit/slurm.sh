#!/bin/bash
# Submit with: sbatch FILE
#SBATCH --job-name=train-mnist
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@60

# One launcher on each host. They find each other in Slurm's variables.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 brigade launch --nproc 2 -- python3 scripts/Train_MNIST.py --lr 0.1
