# A server in a container (docs/serving.md, In a container).
#
#   docker build -t fminfer .                              for CPUs
#   docker build -t fminfer --build-arg DEVICE=cuda .      for NVIDIA's GPUs
ARG BASE=python:3.12-slim-bookworm
ARG WHEEL_BASE=python:3.12-bookworm

# The wheel, with kernels for each processor; the image that serves needs no compiler.
FROM ${WHEEL_BASE} AS wheel
WORKDIR /src
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY scripts/wheel ./scripts/wheel
COPY fminfer ./fminfer
RUN python scripts/wheel --no-try

FROM ${BASE}

# cpu, or cuda. The CUDA libraries come with torch's wheels; the driver comes from the host.
ARG DEVICE=cpu
# Where torch's wheels are looked for beside PyPI; empty: where DEVICE has them.
ARG TORCH_INDEX=
# What else is installed, such as remote: extras of setup.cfg, with commas.
ARG EXTRAS=serve

WORKDIR /opt/fminfer
COPY constraints.txt ./
COPY --from=wheel /src/dist/*manylinux*.whl ./
RUN set -eu; index="${TORCH_INDEX}"; \
    case "${DEVICE}" in \
        cpu) index="${index:-https://download.pytorch.org/whl/cpu}" ;; \
        cuda) ;; \
        *) echo "DEVICE is ${DEVICE}; it must be cpu or cuda" >&2; exit 1 ;; \
    esac; \
    pip install --no-cache-dir --constraint constraints.txt \
        ${index:+--extra-index-url "${index}"} "$(echo ./fminfer-*.whl)[${EXTRAS}]"
COPY scripts/container_start /usr/local/bin/container_start

# Models of the hub, and what else is kept, go to /cache; it must be this user's own.
RUN useradd --create-home --uid 1000 fminfer \
    && install --directory --mode 700 --owner fminfer --group fminfer /cache
ENV XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER fminfer
WORKDIR /home/fminfer

EXPOSE 8020
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m \
    CMD ["container_start", "--health"]
ENTRYPOINT ["container_start"]
