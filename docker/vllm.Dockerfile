# syntax=docker/dockerfile:1
# vLLM with the worker extension in it, for those who want one image and no volume. The base decides the device:
#
#   NVIDIA  --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0
#   Ascend  --build-arg VLLM_IMAGE=quay.io/ascend/vllm-ascend:v0.23.0
#   CPU     --build-arg VLLM_IMAGE=public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0
#
# or your own; add @sha256:... to pin it. Nothing is installed into it: highwater_worker has no dependencies. vLLM loads it
# as a plugin; with HIGHWATER_RECORDER_DIR, a folder shared with the sidecar, each worker tells it that it may be called.
# Without that folder add --worker-extension-cls highwater_worker.MemoryExtension to vLLM's arguments.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# As in extension.Dockerfile.
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY docker/build-requirements.txt docker/
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
      -r docker/build-requirements.txt
COPY worker_ext worker_ext
RUN /opt/build/bin/pip install --no-cache-dir --no-compile --no-deps --no-index --no-build-isolation \
      --target /opt/extension ./worker_ext

FROM ${VLLM_IMAGE}
ARG VLLM_IMAGE
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="highwater-vllm" \
      org.opencontainers.image.description="vLLM with Highwater's worker extension" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${VLLM_IMAGE}"
COPY --from=build /opt/extension /opt/highwater
# Behind what the base has there: Ascend's libraries are found by it. An empty entry would mean the current folder.
ENV PYTHONPATH=/opt/highwater${PYTHONPATH:+:${PYTHONPATH}} \
    VLLM_SERVER_DEV_MODE=1
# Development mode opens control paths that no API key guards: on loopback only the sidecar reaches them.
ENTRYPOINT ["vllm", "serve", "--host", "127.0.0.1"]
