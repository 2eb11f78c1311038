"""Host memory by process: who has what of the container, and of ``/dev/shm``. Reads files; calls no worker."""
