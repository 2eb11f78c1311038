"""Host memory by process: each one's part of the container and of ``/dev/shm``. Reads files; calls no worker."""
