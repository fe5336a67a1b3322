#!/usr/bin/env bash
# Write docker/requirements-{cuda,cpu}.txt from pyproject.toml and constraints.txt: the image's packages with their hashes.
# The CPU list is the CUDA list without NVIDIA's packages, and with torch's CPU wheel, which has another index and hash.
#   docker/lock.sh SHA256_OF_TORCH_CPU_WHEEL      needs uv; sha256sum torch-*+cpu-cp311-*.whl gives the hash
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$#" = 1 ] || { echo "usage: docker/lock.sh SHA256_OF_TORCH_CPU_WHEEL" >&2; exit 2; }
{
  echo "# Made by docker/lock.sh. Python 3.11, Linux x86_64."
  uv pip compile pyproject.toml --extra gpt2 --extra s3 --constraint constraints.txt --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header --no-annotate --quiet
} >docker/requirements-cuda.txt
awk -v hash="$1" '
  /^[a-z]/ { drop = /^(cuda-|triton|nvidia-)/ && !/^nvidia-ml-py/; torch = /^torch==/ }
  /^torch==/ { split($1, part, "=="); print "torch==" part[2] "+cpu \\\n    --hash=sha256:" hash }
  /^#/ || (!drop && !torch) { print }
' docker/requirements-cuda.txt >docker/requirements-cpu.txt
