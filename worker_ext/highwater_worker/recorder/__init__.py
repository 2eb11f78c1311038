"""The recorder: it writes one worker's memory and progress to a file, up to the worker's last moment.

docs/recorder.md describes the file's format. The engine's own thread samples between two steps; a thread of ours writes
a heartbeat, the host's figures, and all threads' stacks when something takes long. That thread refuses to touch torch,
the device and the garbage collector, and to wait for the engine's.
"""
