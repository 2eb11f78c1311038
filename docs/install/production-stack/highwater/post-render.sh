#!/bin/sh
cd "$(dirname "$0")" && cat > all.yaml && exec kubectl kustomize .
