#!/usr/bin/env bash
# Run an overlay's job from apply to deletion, and print what training said.
. "$(dirname "$0")/lib.sh"
parse "usage: try.sh [--dry-run] OVERLAY ...
Apply kuberay/overlays/OVERLAY/job, wait until its RayJob is over, print the driver's log, delete the overlay's objects.
The namespace and its volume are applied before that, and stay.
Exit 0 when every one SUCCEEDED. Overlays: $(cd "$ROOT/kuberay/overlays" && echo *)" "$@"
[ "${#ARGS[@]}" -gt 0 ] || die "which overlay? $(cd "$ROOT/kuberay/overlays" && echo *)"
TIMEOUT="${TIMEOUT:-1800}"
need kubectl
FAILED=()
for overlay in "${ARGS[@]}"; do
  folder="$ROOT/kuberay/overlays/$overlay/job"
  [ -d "$folder" ] || die "there is no overlay '$overlay'"
  say "$overlay"
  # A finished RayJob still exists and would look like the end of this one; a running one may belong to another user.
  if have kubectl -n "$NAMESPACE" get rayjob nanoray; then
    state="$(kubectl -n "$NAMESPACE" get rayjob nanoray -o jsonpath='{.status.jobDeploymentStatus}')"
    case "$state" in
      Complete | Failed) run kubectl -n "$NAMESPACE" delete rayjob nanoray --wait ;;
      *) die "RayJob nanoray is there and ${state:-starting}; wait for it, or kubectl -n $NAMESPACE delete rayjob nanoray" ;;
    esac
  fi
  # The overlay's header names the kustomization that its namespace comes from.
  shared="$(sed -n 's|^# Before: .* -k kuberay/\([a-z-]*\) .*|\1|p' "$folder/kustomization.yaml")"
  run kubectl apply --server-side -k "$ROOT/kuberay/$shared"
  run kubectl apply --server-side -k "$folder"
  if [ "$DRY_RUN" = 1 ]; then
    printf 'kubectl -n %q get rayjob nanoray -o jsonpath={.status.jobDeploymentStatus}   # until Complete or Failed\n' "$NAMESPACE"
    run kubectl delete -k "$folder" --wait --ignore-not-found
    continue
  fi
  status="" last="" began="$SECONDS"
  while [ $((SECONDS - began)) -lt "$TIMEOUT" ]; do
    status="$(kubectl -n "$NAMESPACE" get rayjob nanoray -o jsonpath='{.status.jobDeploymentStatus}/{.status.jobStatus}' 2>/dev/null || true)"
    if [ "$status" != "$last" ]; then
      echo "$((SECONDS - began)) s: $status"
      last="$status"
    fi
    case "$status" in Complete/* | Failed/*) break ;; esac
    sleep 3
  done
  head="$(kubectl -n "$NAMESPACE" get pod -l ray.io/node-type=head -o name | head -n 1)"
  if [ -n "$head" ]; then
    kubectl -n "$NAMESPACE" exec "${head#pod/}" -c ray-head -- bash -c 'cat /tmp/ray/session_latest/logs/job-driver-*.log' || true
  fi
  if [ "$status" != Complete/SUCCEEDED ]; then
    FAILED+=("$overlay: ${status:-no status}")
    "$SCRIPTS/bundle.sh" || true
  fi
  kubectl delete -k "$folder" --wait --ignore-not-found
done
[ "${#FAILED[@]}" = 0 ] || die "${FAILED[*]}"
