# Sourced by the scripts beside it: flags, messages, and `run`, which --dry-run turns into a printout.
# shellcheck shell=bash
set -euo pipefail

DRY_RUN=0
NAMESPACE="${NAMESPACE:-nanoray}"
SCRIPTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$SCRIPTS/../.." && pwd)"
KUBERAY_VERSION=1.7.0
# The tag that kuberay/base/kustomization.yaml names, without the device at its end.
IMAGE_TAG="$(sed -n 's/^ *newTag: *\([^ ]*\)-cpu.*/\1/p' "$ROOT/kuberay/base/kustomization.yaml")"
export NAMESPACE SCRIPTS ROOT KUBERAY_VERSION IMAGE_TAG

say() { printf '== %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# Run a command, or with --dry-run print it as it could be pasted.
run() {
  if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# Ask a question of the machine or the cluster; in a dry run the answer is no, so that every step is printed.
have() {
  [ "$DRY_RUN" = 0 ] && "$@" >/dev/null 2>&1
}

need() {
  local tool
  for tool in "$@"; do
    [ "$DRY_RUN" = 1 ] || command -v "$tool" >/dev/null || die "$tool is not installed, and this script needs it"
  done
}

# usage TEXT "$@": handle --help and --dry-run; what is left is in ARGS.
ARGS=()
parse() {
  local usage="$1" word
  shift
  for word in "$@"; do
    case "$word" in
      -h | --help)
        printf '%s\n' "$usage"
        exit 0
        ;;
      --dry-run) DRY_RUN=1 ;;
      -*) die "unknown flag $word; see --help" ;;
      *) ARGS+=("$word") ;;
    esac
  done
}
