#!/bin/sh
# Installs PyTorch before everything else, so that no package pulls in a build of its own choice.
#   TORCH=cpu    the CPU build of the version below (default)
#   TORCH=cu126, cu128, cu130   a CUDA build from PyTorch's own index
#   TORCH=pypi   whatever the package index offers
#   TORCH=skip   PyTorch is already there
set -eu
VERSION=2.13.0
PIP=${PIP:-python3 -m pip}
TORCH=${TORCH:-cpu}

have() { $PIP show torch >/dev/null 2>&1; }

case "$TORCH" in
skip)
    have || { echo "error: TORCH=skip, but PyTorch is not installed" >&2; exit 2; }
    ;;
pypi)
    $PIP install --quiet "torch==$VERSION"
    ;;
cpu)
    have && exit 0
    # A plain install may hold several gigabytes of CUDA libraries: look first, and take it only if it is a CPU build.
    if $PIP install --dry-run --quiet --report - "torch==$VERSION" 2>/dev/null | grep -qi '"name": *"nvidia'; then
        $PIP install --quiet --index-url https://download.pytorch.org/whl/cpu "torch==$VERSION" || {
            echo "error: no CPU build of PyTorch $VERSION could be reached; install one by hand and run again with TORCH=skip" >&2
            exit 2
        }
    else
        $PIP install --quiet "torch==$VERSION"
    fi
    ;;
cu*)
    $PIP install --quiet --index-url "https://download.pytorch.org/whl/$TORCH" "torch==$VERSION"
    ;;
*)
    echo "error: TORCH must be cpu, cu126, cu128, cu130, pypi or skip, got $TORCH" >&2
    exit 2
    ;;
esac
