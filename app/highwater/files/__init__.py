"""Files: what the sidecar keeps on disk, certificates, and files of others, opened safely."""
