#!/bin/bash
# A build in 64 parts as a Slurm job array, and the job that finishes it.
#
#   sbatch slurm_array.sh '/data/raw/*.jsonl.zst' /data/tokenizer.json /data/store
#
# Parts that failed are run again, and the build is finished, with: sbatch --array=3,17 slurm_array.sh ...
#SBATCH --job-name=tokenmill
#SBATCH --array=1-64
#SBATCH --cpus-per-task=16
#SBATCH --mem=40G
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail
input=$1 tokenizer=$2 store=$3
parts=64 # as in --array above; it stays the same when only some of them are run again

# The first task of the array queues the job that finishes the build when all tasks have succeeded.
if [[ "${SLURM_ARRAY_TASK_ID}" == "${SLURM_ARRAY_TASK_MIN}" && "${SLURM_RESTART_COUNT:-0}" == 0 ]]; then
  sbatch --job-name=tokenmill-finish --dependency="afterok:${SLURM_ARRAY_JOB_ID}" --mem=8G \
    --wrap="$(printf '%q ' tokenmill finish "${store}")"
fi

# Quoted, the glob reaches tokenmill as it is, which expands it. Every part has the same --memory,
# since the largest document that is taken follows from it.
exec srun tokenmill build "${input}" --tokenizer "${tokenizer}" --out "${store}" \
  --workers "${SLURM_CPUS_PER_TASK}" --memory 32GB \
  --part "${SLURM_ARRAY_TASK_ID}/${parts}"
