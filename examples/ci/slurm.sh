#!/bin/bash
# sbatch slurm.sh: two nodes of eight GPUs, gated by baselines/cluster; the job's exit code is the gate's.
# results/ lies on a file system that every node sees. baselines/cluster is written once, on the login node:
# `meshmark baseline accept results/JOB --name cluster`.
#SBATCH --job-name=meshmark
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --output=meshmark-%j.log

set -u
. .venv/bin/activate
results="results/$SLURM_JOB_ID"

srun pytest --pyargs meshmark.suites --device cuda --world 16 --workload gpt-1.3b --global-batch 32 --precision bf16 \
    --baseline cluster --fail-on wrong,bigger:1%,slower:3% --max-time 100m --results "$results"
ended=$?

meshmark report "$results" -o "$results/report.html"
exit "$ended"
