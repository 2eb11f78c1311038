# syntax=docker/dockerfile:1
# Only highwater_worker/, a folder of plain Python: for an image volume, or to be copied into a volume.
#
#   docker build -f docker/extension.Dockerfile -t highwater-extension .
#   docker build -f docker/extension.Dockerfile -t highwater-extension:copy --target copy .
#
# Mounted at /opt/highwater (the first), or run with a volume at /target (the second), the engine needs
# PYTHONPATH=/opt/highwater and --worker-extension-cls highwater_worker.MemoryExtension.
ARG COPY_IMAGE=busybox:1.37-musl

FROM ${COPY_IMAGE} AS copy
LABEL org.opencontainers.image.title="highwater-extension" \
      org.opencontainers.image.description="Copies Highwater's worker extension into the volume at /target" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY LICENSE /licenses/LICENSE
COPY worker_ext/highwater_worker /highwater_worker
USER 65532:65532
CMD ["cp", "-r", "/highwater_worker", "/target/"]

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
COPY worker_ext/highwater_worker /highwater_worker
USER 65532:65532
