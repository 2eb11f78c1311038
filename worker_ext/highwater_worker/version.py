"""This package's version, which every answer of `hello` and every recorder file names."""

EXTENSION_VERSION = "0.1.0"
