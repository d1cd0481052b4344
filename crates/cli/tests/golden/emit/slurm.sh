#!/bin/bash
# Submit with: sbatch FILE
#SBATCH --job-name=train-mnist
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@60

# 60 s before the time limit Slurm sends SIGTERM to every process of a step, and the launchers
# pass it on: a rank may get it twice, and what a rank has started gets it, too.
# One launcher on each host. They find each other in Slurm's variables.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 brigade launch --nproc 2 -- python3 scripts/Train_MNIST.py --lr 0.1
