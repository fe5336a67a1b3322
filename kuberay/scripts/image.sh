#!/usr/bin/env bash
# Build the image and hand it to k3s, which has no registry and does not see docker's images.
. "$(dirname "$0")/lib.sh"
parse "usage: image.sh [--dry-run] [cpu|cuda] [NCCL_VERSION]
Build nanoray:$IMAGE_TAG-cpu (or -cuda) with docker, podman or nerdctl and import it into k3s' containerd.
NCCL_VERSION replaces the NCCL that torch brings: 2.32.3 for several MIG slices of one GPU." "$@"
DEVICE="${ARGS[0]:-cpu}"
NCCL="${ARGS[1]:-}"
case "$DEVICE" in cpu | cuda) ;; *) die "'$DEVICE' is neither cpu nor cuda" ;; esac
BUILDER=docker
for tool in docker podman nerdctl; do
  if command -v "$tool" >/dev/null; then
    BUILDER="$tool"
    break
  fi
done
need "$BUILDER" k3s
IMAGE="docker.io/library/nanoray:$IMAGE_TAG-$DEVICE" # in full: podman would put localhost/ before it
FLAGS=(--build-arg "DEVICE=$DEVICE")
[ -z "$NCCL" ] || FLAGS+=(--build-arg "NCCL=$NCCL")
for name in HTTP_PROXY HTTPS_PROXY NO_PROXY; do # predefined build arguments: they leave no trace in the image
  [ -z "${!name:-}" ] || FLAGS+=(--build-arg "$name")
done

say "building $IMAGE"
run "$BUILDER" build -f "$ROOT/docker/Dockerfile" -t "$IMAGE" "${FLAGS[@]}" "$ROOT"

say "importing it into k3s"
ARCHIVE="$(mktemp --suffix=.tar)"
trap 'rm -f "$ARCHIVE"' EXIT
run "$BUILDER" save -o "$ARCHIVE" "$IMAGE"
run k3s ctr images import "$ARCHIVE"
run k3s ctr images ls "name==$IMAGE"
