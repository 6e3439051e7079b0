#!/usr/bin/env bash
#SBATCH --job-name=weighbridge
#SBATCH --nodes=2
#SBATCH --signal=B:TERM@300
# A trainer with one service on each of its nodes, all over one store:
#
#     sbatch --ntasks-per-node=8 --gpus-per-node=8 --export=ALL,STORE=s3://bucket/prefix deploy/slurm.sh python train.py
#
# Each rank finds the service of its own node in WEIGHBRIDGE_SERVER, with an authority and a token of this job in WEIGHBRIDGE_CA and
# WEIGHBRIDGE_TOKEN_FILE: other users reach the ports, and are refused. An engine elsewhere takes the same three, from RUN_FOLDER.
#
# STORE       a bucket, or a folder that all nodes mount
# SCRATCH     a folder on each node's own disk, for what may be lost (/tmp/weighbridge-JOB)
# RUN_FOLDER  a folder that all nodes mount, for certificates, policy and token (weighbridge-JOB, where sbatch was called)
# LISTEN      the address at which services listen on their nodes (0.0.0.0)
# GRPC_PORT, HTTP_PORT   50051 (streams of weights take the one behind it) and 8080; others where jobs share nodes
# OPTIONS     further options of weighbridge serve, such as --memory-budget 200GiB
# DEPLOY      the folder with certificates.sh (deploy, where sbatch was called)
set -euo pipefail

: "${STORE:?a bucket, or a folder that all nodes mount}"
[[ $# -gt 0 ]] || { echo "usage: sbatch [OPTIONS] $0 TRAINER [ARGUMENTS]" >&2; exit 2; }
export STORE SCRATCH=${SCRATCH:-/tmp/weighbridge-$SLURM_JOB_ID} RUN_FOLDER=${RUN_FOLDER:-$PWD/weighbridge-$SLURM_JOB_ID}
export LISTEN=${LISTEN:-0.0.0.0} GRPC_PORT=${GRPC_PORT:-50051} HTTP_PORT=${HTTP_PORT:-8080} OPTIONS=${OPTIONS:-}
export WEIGHBRIDGE_CA=$RUN_FOLDER/tls/ca.pem WEIGHBRIDGE_TOKEN_FILE=$RUN_FOLDER/token

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
mkdir -p "$RUN_FOLDER"
DAYS=30 "${DEPLOY:-deploy}/certificates.sh" "$RUN_FOLDER/tls" "${nodes[@]}"
{ read -r _ token && read -r _ digest; } < <(weighbridge token)
(umask 077 && echo "$token" > "$WEIGHBRIDGE_TOKEN_FILE")
printf '[[identity]]\nname = "job-%s"\nmay = ["admin"]\ntokens = ["%s"]\n' "$SLURM_JOB_ID" "$digest" > "$RUN_FOLDER/policy.toml"

# Step 0 of the job: one task a node, which shares the node's processors and memory with the trainer's ranks.
# shellcheck disable=SC2016 # the variables are those of each node
srun --overlap --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --mem=0 --cpu-bind=none bash -c '
    exec weighbridge serve --grpc "$LISTEN:$GRPC_PORT" --http "$LISTEN:$HTTP_PORT" --advertise "$SLURMD_NODENAME:$GRPC_PORT" \
        --store "$STORE" --scratch "$SCRATCH" --drain-seconds 120 --policy "$RUN_FOLDER/policy.toml" \
        --tls-cert "$RUN_FOLDER/tls/$SLURMD_NODENAME.pem" --tls-key "$RUN_FOLDER/tls/$SLURMD_NODENAME.key" $OPTIONS' &
services=$!

stop_services() { # SIGTERM to srun would be SIGKILL to its tasks, and lose what is not durable yet
    trap '' TERM
    scancel --signal=TERM "$SLURM_JOB_ID.0" || true
    wait "$services" || echo "a service has not ended well: its log says which versions are not durable" >&2
    services=
}

trainer=
signalled=
# shellcheck disable=SC2329 # the trap calls it
stop_trainer() { # before the time limit: ranks end, then services make durable what they have
    trap '' TERM
    signalled=yes
    [[ -z $trainer ]] || scancel --signal=TERM "$SLURM_JOB_ID.1" || true
}
trap stop_trainer TERM
trap '[[ -z $services ]] || stop_services' EXIT

for node in "${nodes[@]}"; do
    for attempt in {1..12}; do # each tries for ten seconds
        weighbridge models --server "$node:$GRPC_PORT" > /dev/null && break
        [[ $attempt -lt 12 ]] || { echo "the service on $node does not answer" >&2; exit 1; }
        kill -0 "$services" || { echo "the services have ended" >&2; exit 1; }
    done
done

[[ -z $signalled ]] || exit 143
# Step 1
# shellcheck disable=SC2016
srun --overlap bash -c 'WEIGHBRIDGE_SERVER=$SLURMD_NODENAME:$GRPC_PORT exec "$@"' trainer "$@" &
trainer=$!
code=0
wait "$trainer" || code=$?
if [[ -n $signalled ]]; then # the signal has ended that wait, unless the trainer had ended (127: it was waited for)
    again=0
    wait "$trainer" || again=$?
    [[ $again -eq 127 ]] || code=$again
fi
stop_services
exit "$code"
