# syntax=docker/dockerfile:1
# Only the worker package, plain Python with the metadata by which vLLM finds its plugin: for an image volume.
#
#   docker build -f docker/extension.Dockerfile -t highwater-extension .
#
# Mounted at /opt/highwater, the engine needs PYTHONPATH=/opt/highwater, and HIGHWATER_RECORDER_DIR to be watched. The
# sidecar's image fills a volume with the same: highwater extension --copy-to DIR.
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY docker/build-requirements.txt docker/
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --no-compile --require-hashes --only-binary :all: \
      -r docker/build-requirements.txt
COPY worker_ext worker_ext
RUN /opt/build/bin/pip install --no-cache-dir --no-compile --no-deps --no-index --no-build-isolation \
      --target /opt/extension ./worker_ext

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="highwater-extension" \
      org.opencontainers.image.description="Highwater's worker extension for vLLM: files, and nothing that runs by itself" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}"
COPY LICENSE /licenses/LICENSE
COPY --from=build /opt/extension/ /
USER 65532:65532
