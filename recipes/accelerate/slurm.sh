#!/usr/bin/env bash
# A run on 4 nodes with 8 GPUs each; NOT RUN by us: there was no cluster at hand.
#   sbatch recipes/accelerate/slurm.sh recipes/ras_multitask.py --config recipes/configs/llama2_7b_ras_paper.yaml --train.records_per_step 64
# For ZeRO-3 or FSDP2: LAUNCHER=recipes/accelerate/zero3.yaml sbatch …
#SBATCH --job-name=tripletune
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --signal=USR1@300
# Five minutes before the job's end, SLURM sends USR1, and every training process saves a checkpoint. A requeued job
# continues from its newest checkpoint. The trap keeps the launcher alive, which does not handle USR1.
set -euo pipefail
export LAUNCHER=${LAUNCHER:-recipes/accelerate/multinode.yaml}
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'trap "" USR1; accelerate launch --quiet --config_file "$LAUNCHER" --num_machines "$SLURM_NNODES" \
    --num_processes $((SLURM_NNODES * 8)) --machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD_NODE" \
    --main_process_port 29500 "$@"' launch "$@"
