#!/usr/bin/env bash
# Train a ResNet on CIFAR-10 with FSDP2 (sharded weights, gradients, optimizer state), by torchrun:
# one process per GPU of this machine, 2 without a GPU.
# Flags of nanoray.train may follow: examples/scripts/run_fsdp_single_node.sh --num_epochs 1 --resnet_depth 8
# RANKS sets the number of processes, PYTHON the interpreter.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$repository/.venv/bin/python}
ranks=${RANKS:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}

exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m nanoray.train \
  --config "$repository/examples/configs/fsdp_resnet_cifar10.yaml" "$@"
