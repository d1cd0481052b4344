#!/bin/bash
# Submit with: sbatch FILE
#SBATCH --job-name=mnist-2
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu
#SBATCH --account=lab-7
#SBATCH --signal=TERM@150

export NCCL_DEBUG=INFO
export NOTE="it's "'$HOME'

# Made for each run: the launchers authenticate each other with it.
BRIGADE_RDZV_SECRET=$(openssl rand -hex 32) || exit 1
export BRIGADE_RDZV_SECRET

# 150 s before the time limit Slurm sends SIGTERM to every process of a step, and the launchers
# pass it on: a rank may get it twice, and what a rank has started gets it, too.
# One launcher on each host. They find each other in Slurm's variables.
# The plugin Pyxis starts it in a container. Brigade's docs/containers.md says how to build
# the image.
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --cpus-per-task=64 --container-image=registry.example.org/train:1 --container-mounts="$PWD:$PWD" --container-workdir="$PWD" brigade launch --nproc 8 --max-restarts 3 -- ./train --epochs 4
