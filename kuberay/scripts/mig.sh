#!/usr/bin/env bash
# Set a MIG profile on a node, or unset it, through the GPU Operator's MIG manager. Asks first: it ends what runs there.
. "$(dirname "$0")/lib.sh"
parse "usage: mig.sh [--dry-run] NODE PROFILE
Label NODE so that the MIG manager makes its GPUs PROFILE: all-1g.18gb, all-3g.71gb, all-disabled, or a name of your
own in the ConfigMap that is printed without arguments. Every process on the node's GPUs must have ended." "$@"
if [ "${#ARGS[@]}" = 0 ]; then
  say "profiles that the MIG manager knows (kubectl edit this ConfigMap for your own)"
  run kubectl -n gpu-operator get configmap default-mig-parted-config -o yaml
  say "nodes"
  run kubectl get nodes -L nvidia.com/mig.capable,nvidia.com/mig.config,nvidia.com/mig.config.state
  exit 0
fi
[ "${#ARGS[@]}" = 2 ] || die "give NODE and PROFILE; see --help"
NODE="${ARGS[0]}"
PROFILE="${ARGS[1]}"
TIMEOUT="${TIMEOUT:-600}"
PAUSE="${PAUSE:-2}"
need kubectl
DONE="kubernetes.io/hostname=$NODE,nvidia.com/mig.config=$PROFILE,nvidia.com/mig.config.state=success"
if [ "$DRY_RUN" = 0 ] && [ -n "$(kubectl get node -l "$DONE" -o name)" ]; then
  echo "$NODE has $PROFILE already"
  exit 0
fi
if [ "$DRY_RUN" = 0 ] && [ "${YES:-}" != 1 ]; then
  read -r -p "reconfigure all GPUs of $NODE to $PROFILE? What runs on them ends. [y/N] " answer
  [ "$answer" = y ] || die "nothing was changed"
fi
# The manager acts only when the profile's label changes, so after a failure the same profile must first be taken away.
if [ "$DRY_RUN" = 1 ] || [ -n "$(kubectl get node -l "kubernetes.io/hostname=$NODE,nvidia.com/mig.config=$PROFILE" -o name)" ]; then
  run kubectl label node "$NODE" nvidia.com/mig.config-
fi
# pending: the last change's success must not be taken for this one's
run kubectl label node "$NODE" "nvidia.com/mig.config=$PROFILE" nvidia.com/mig.config.state=pending --overwrite
say "waiting for the MIG manager"
STATE=(kubectl get node "$NODE" -o 'jsonpath={.metadata.labels.nvidia\.com/mig\.config\.state}')
state=pending last="" began="$SECONDS"
until [ "$state" = success ]; do
  if [ "$DRY_RUN" = 1 ]; then
    run "${STATE[@]}" # until success or failed
    break
  fi
  [ $((SECONDS - began)) -lt "$TIMEOUT" ] || die "$NODE is still $state after $TIMEOUT s; kubectl -n gpu-operator logs -l app=nvidia-mig-manager"
  sleep "$PAUSE"
  state="$("${STATE[@]}" || true)" # a node that reboots may take the API server with it
  if [ "$state" != "$last" ]; then
    echo "$((SECONDS - began)) s: $state"
    last="$state"
  fi
  [ "$state" != failed ] || die "$NODE did not get $PROFILE; end what uses its GPUs and run this again. kubectl -n gpu-operator logs -l app=nvidia-mig-manager says more"
done
run kubectl get node "$NODE" -o "jsonpath={.status.allocatable}"
