#!/usr/bin/env bash
# Remove what these scripts made. Runs and checkpoints are never removed.
. "$(dirname "$0")/lib.sh"
parse "usage: cleanup.sh [--dry-run] [workloads|operators|everything]
workloads   RayCronJobs, RayJobs, RayClusters, the StatefulSet and the namespace $NAMESPACE   (default)
operators   and KubeRay, the GPU Operator and NVIDIA's DRA driver
everything  and k3s. /var/lib/nanoray, with runs and checkpoints, is never removed: that command is printed" "$@"
LEVEL="${ARGS[0]:-workloads}"
case "$LEVEL" in workloads | operators | everything) ;; *) die "'$LEVEL' is none of workloads, operators, everything" ;; esac
need kubectl
say "workloads"
# Objects first, while the operator still runs and can remove their finalizers; else the namespace would never terminate.
# RayCronJobs before RayJobs, which they would create anew.
if have kubectl get crd raycronjobs.ray.io || [ "$DRY_RUN" = 1 ]; then
  run kubectl -n "$NAMESPACE" delete raycronjobs --all --wait --ignore-not-found --timeout=180s
fi
if have kubectl get crd rayjobs.ray.io || [ "$DRY_RUN" = 1 ]; then
  run kubectl -n "$NAMESPACE" delete rayjobs,rayclusters --all --wait --ignore-not-found --timeout=180s
fi
run kubectl delete namespace "$NAMESPACE" --wait --ignore-not-found --timeout=180s
VOLUME="nanoray-$NAMESPACE" # as `nanoray kube` names it
[ "$NAMESPACE" != nanoray ] || VOLUME=nanoray
run kubectl delete persistentvolume "$VOLUME" --ignore-not-found
if [ "$LEVEL" != workloads ]; then
  say "operators"
  need helm
  run helm uninstall kuberay-operator --namespace kuberay-system --ignore-not-found --wait
  run kubectl delete crd rayclusters.ray.io rayjobs.ray.io rayservices.ray.io raycronjobs.ray.io --ignore-not-found
  run helm uninstall nvidia-dra-driver-gpu --namespace nvidia-dra-driver-gpu --ignore-not-found --wait
  run helm uninstall gpu-operator --namespace gpu-operator --ignore-not-found --wait
fi
if [ "$LEVEL" = everything ]; then
  say "k3s"
  if have test -x /usr/local/bin/k3s-uninstall.sh || [ "$DRY_RUN" = 1 ]; then run /usr/local/bin/k3s-uninstall.sh; fi
fi
echo "runs and checkpoints are still in /var/lib/nanoray; to remove them: sudo rm -r /var/lib/nanoray"
