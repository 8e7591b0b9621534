#!/bin/bash
# Train on any number of hosts under SLURM, through time limits and preemption:
#
#     sbatch --nodes=2 examples/slurm_train.sh horst run table6 --scale paper
#
# Everything after the script's name is the command that every process runs, one process per GPU. Its run goes into a
# directory that all hosts share. Before the time limit SLURM sends SIGTERM: the loop saves a checkpoint and exits with code 143,
# and the job is queued again. Started again, it goes on from that checkpoint, also on another number of GPUs.
#
# SLURM starts the processes itself, with the environment variables that torchrun would set. torchrun works as well
# (srun torchrun --nnodes=... --no-python COMMAND), but kills its processes 30 seconds after a SIGTERM, which a large
# checkpoint may exceed.

#SBATCH --job-name=horst
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8        # as many as GPUs
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300          # five minutes before the limit
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch [options] $0 COMMAND [ARGUMENTS]" >&2
    exit 2
fi

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*} # the first
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # another one for each job on a host
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# Since SLURM 22.05 srun does not take --cpus-per-task from the job: each process would get one core.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# Compiled kernels stay on the host's own disk: a job that comes back there does not compile again.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/${USER:-horst}/torchinductor}

code=0
# The variables are those of each process, so they are set there.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c \
    'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; exec "$@"' bash "$@" || code=$?

if [ "$code" -eq 143 ]; then # stopped by SIGTERM, and saved
    scontrol requeue "$SLURM_JOB_ID"
else
    exit "$code"
fi
