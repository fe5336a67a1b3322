#!/usr/bin/env bash
# Collect objects, events and logs for support in one archive, without secrets and without values of variables.
. "$(dirname "$0")/lib.sh"
parse "usage: bundle.sh [--dry-run] [FILE.tar.gz]
Collect objects, events, logs of every container and of Ray, and the nodes' GPUs, of namespace $NAMESPACE." "$@"
FILE="${ARGS[0]:-nanoray-bundle-$(date -u +%Y%m%d-%H%M%S).tar.gz}"
need kubectl tar
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT

# keep FILE COMMAND...: what it printed, and its error where there was one; a missing piece must not end the rest.
keep() {
  local name="$1"
  shift
  if [ "$DRY_RUN" = 1 ]; then
    run "$@"
  elif ! "$@" >"$FOLDER/$name" 2>&1; then
    echo "failed: $*" >>"$FOLDER/$name"
  fi
}

keep version.txt kubectl version
keep nodes.txt kubectl describe nodes
keep events.txt kubectl -n "$NAMESPACE" get events --sort-by=.lastTimestamp
keep objects.txt kubectl -n "$NAMESPACE" get pods,services,jobs,deployments,statefulsets,pvc,networkpolicies -o wide
keep ray.yaml kubectl -n "$NAMESPACE" get rayjobs,rayclusters -o yaml
keep claims.yaml kubectl -n "$NAMESPACE" get resourceclaims,resourceclaimtemplates -o yaml # fails before Kubernetes 1.34
keep devices.yaml kubectl get deviceclasses,resourceslices -o yaml
keep pods.txt kubectl -n "$NAMESPACE" describe pods
# `kubectl logs` reads one namespace only, and the operator may be in any. Helm labels it kuberay-operator, kustomize kuberay.
OPERATOR=(-A -l 'app.kubernetes.io/name in (kuberay-operator,kuberay)')
keep operator.txt kubectl get pods "${OPERATOR[@]}" -o wide
if [ "$DRY_RUN" = 0 ]; then
  found="$(kubectl get pods "${OPERATOR[@]}" --no-headers -o custom-columns=:metadata.namespace,:metadata.name 2>/dev/null || true)"
  while read -r space pod; do
    [ -n "$pod" ] || continue
    keep "operator-$pod.log" kubectl -n "$space" logs "$pod" --all-containers --tail=2000
  done <<<"$found"
  cat "$FOLDER"/operator-*.log >"$FOLDER/operator.log" 2>/dev/null || echo "no operator pod was found, or it may not be read" >"$FOLDER/operator.log"
  rm -f "$FOLDER"/operator-*.log
  while read -r pod; do
    [ -n "$pod" ] || continue
    keep "$(basename "$pod").log" kubectl -n "$NAMESPACE" logs "$pod" --all-containers --tail=5000
    case "$pod" in *head*) keep driver.log kubectl -n "$NAMESPACE" exec "${pod#pod/}" -- bash -c 'cat /tmp/ray/session_latest/logs/job-driver-*.log' ;; esac
  done < <(kubectl -n "$NAMESPACE" get pods -o name 2>/dev/null || true)
  # A token must not leave the cluster, wherever it was printed.
  find "$FOLDER" -type f -exec sed -i -E 's/([Aa]uth_?[Tt]oken"?[:=] *"?)[^" ]+/\1(removed)/g; s#(://)[^/@ ]+@#\1(removed)@#g' {} +
fi
run tar -czf "$FILE" -C "$FOLDER" .
[ "$DRY_RUN" = 1 ] || echo "$FILE"
