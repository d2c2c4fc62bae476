#!/bin/sh
# Makes an environment with pfl-research, for `protofed speed --pfl FOLDER/bin/python`. Its requirements contradict
# Flower's (dp-accounting), so it has a place of its own; PyTorch is the version that we use.
#   sh benchmarks/speed/pfl.sh build/pfl
set -eu
FOLDER=${1:-build/pfl}
HERE=$(dirname "$0")
${PYTHON:-python3} -m venv "$FOLDER"
PIP="$FOLDER/bin/python -m pip" TORCH=${TORCH:-cpu} sh "$HERE/../../scripts/torch.sh"
"$FOLDER/bin/python" -m pip install --quiet pfl==0.6.0 jaxtyping safetensors numpy psutil pyarrow
echo "made $FOLDER; use: protofed speed --peers loop,pfl,flower --pfl $FOLDER/bin/python"
