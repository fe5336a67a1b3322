#!/usr/bin/env bash
# From a bare Linux server to a cluster that takes our manifests. Running it again changes nothing.
. "$(dirname "$0")/lib.sh"
parse "usage: install.sh [--dry-run] [cpu|gpu|gpu-dra]
Install k3s, helm, KubeRay $KUBERAY_VERSION and (gpu) NVIDIA's GPU Operator on this server; make the storage folder.
gpu-dra: the GPU Operator without its device plugin, and NVIDIA's DRA driver, which gives out the GPUs in its place.
HTTP_PROXY, HTTPS_PROXY and NO_PROXY of this shell are handed on to k3s; nanoray's pods have kuberay/namespace/proxy.yaml. The NVIDIA driver must be there already (nvidia-smi), or the GPU Operator installs one." "$@"
KIND="${ARGS[0]:-cpu}"
case "$KIND" in
cpu) IMAGE=cpu OVERLAY=cpu ;;
gpu) IMAGE=cuda OVERLAY=single-pod ;;
gpu-dra) IMAGE=cuda OVERLAY=gpu-dra ;;
*) die "'$KIND' is none of cpu, gpu, gpu-dra" ;;
esac
K3S_VERSION="${K3S_VERSION:-v1.34.1+k3s1}"
GPU_OPERATOR_VERSION="${GPU_OPERATOR_VERSION:-v25.10.0}"
DRA_DRIVER_VERSION="${DRA_DRIVER_VERSION:-25.12.0}"
[ "$DRY_RUN" = 1 ] || [ "$(id -u)" = 0 ] || die "k3s and the storage folder need root: sudo -E $0 $*"
need curl

say "proxy"
CLUSTER_NETS=10.42.0.0/16,10.43.0.0/16,127.0.0.1,localhost,.svc,.cluster.local
if [ -n "${HTTPS_PROXY:-${https_proxy:-}}" ]; then
  HTTPS_PROXY="${HTTPS_PROXY:-$https_proxy}"
  HTTP_PROXY="${HTTP_PROXY:-${http_proxy:-$HTTPS_PROXY}}"
  NO_PROXY="${NO_PROXY:-${no_proxy:-}}"
  case ",$NO_PROXY," in *,10.42.0.0/16,*) ;; *) NO_PROXY="${NO_PROXY:+$NO_PROXY,}$CLUSTER_NETS" ;; esac
  case "$HTTPS_PROXY$HTTP_PROXY" in *@*) die "the proxy's URL holds a password; k3s would write it into a file" ;; esac
  export HTTP_PROXY HTTPS_PROXY NO_PROXY # k3s' installer copies them into the service's environment file
  echo "through $HTTPS_PROXY, except for $NO_PROXY"
else
  echo "none"
fi

say "k3s $K3S_VERSION"
if have systemctl is-active k3s; then
  echo "runs already"
else
  INSTALLER="$(mktemp)"
  trap 'rm -f "$INSTALLER"' EXIT
  run curl -fsSL https://get.k3s.io -o "$INSTALLER"
  run env INSTALL_K3S_VERSION="$K3S_VERSION" sh "$INSTALLER" --write-kubeconfig-mode 600 --disable traefik
fi
export KUBECONFIG="${KUBECONFIG:-/etc/rancher/k3s/k3s.yaml}"
run k3s kubectl wait --for=condition=Ready node --all --timeout=180s

say "helm"
if have command -v helm; then
  echo "is there"
else
  HELM="$(mktemp)"
  run curl -fsSL https://raw.githubusercontent.com/helm/helm/main/scripts/get-helm-3 -o "$HELM"
  run bash "$HELM"
  rm -f "$HELM"
fi

say "KubeRay $KUBERAY_VERSION (its CRDs are too large for a client-side apply; helm does it right)"
run helm repo add --force-update kuberay https://ray-project.github.io/kuberay-helm/
run helm upgrade --install kuberay-operator kuberay/kuberay-operator --version "$KUBERAY_VERSION" \
  --namespace kuberay-system --create-namespace --wait --timeout 5m

if [ "$KIND" != cpu ]; then
  DEVICE_PLUGIN=true
  [ "$KIND" = gpu ] || DEVICE_PLUGIN=false
  if [ "$KIND" = gpu ] && have helm status nvidia-dra-driver-gpu --namespace nvidia-dra-driver-gpu; then
    die "NVIDIA's DRA driver is installed, and with the device plugin beside it two pods could get one GPU; helm uninstall it, or take gpu-dra"
  fi
  say "GPU Operator $GPU_OPERATOR_VERSION"
  DRIVER=true
  if have nvidia-smi; then DRIVER=false; fi
  run helm repo add --force-update nvidia https://helm.ngc.nvidia.com/nvidia
  run helm upgrade --install gpu-operator nvidia/gpu-operator --version "$GPU_OPERATOR_VERSION" \
    --namespace gpu-operator --create-namespace --wait --timeout 15m \
    --set driver.enabled="$DRIVER" --set mig.strategy=mixed --set devicePlugin.enabled="$DEVICE_PLUGIN" \
    --set toolkit.env[0].name=CONTAINERD_CONFIG --set toolkit.env[0].value=/var/lib/rancher/k3s/agent/etc/containerd/config.toml \
    --set toolkit.env[1].name=CONTAINERD_SOCKET --set toolkit.env[1].value=/run/k3s/containerd/containerd.sock
fi

if [ "$KIND" = gpu-dra ]; then
  say "NVIDIA's DRA driver $DRA_DRIVER_VERSION"
  DRIVER_ROOT=/
  [ "$DRIVER" = false ] || DRIVER_ROOT=/run/nvidia/driver # where the GPU Operator installs it
  run helm upgrade --install nvidia-dra-driver-gpu nvidia/nvidia-dra-driver-gpu --version "$DRA_DRIVER_VERSION" \
    --namespace nvidia-dra-driver-gpu --create-namespace --wait --timeout 10m \
    --set nvidiaDriverRoot="$DRIVER_ROOT" --set gpuResourcesEnabledOverride=true
fi

say "storage"
run install -d -o 1000 -g 1000 -m 0750 /var/lib/nanoray

say "done"
echo "next: $SCRIPTS/image.sh $IMAGE; $SCRIPTS/try.sh $OVERLAY"
