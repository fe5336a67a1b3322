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
# pending: the last change's success must not be taken for this one's
run kubectl label node "$NODE" "nvidia.com/mig.config=$PROFILE" nvidia.com/mig.config.state=pending --overwrite
say "waiting for the MIG manager"
run kubectl wait "node/$NODE" --for="jsonpath={.metadata.labels.nvidia\.com/mig\.config\.state}=success" --timeout=600s
run kubectl get node "$NODE" -o "jsonpath={.status.allocatable}"
