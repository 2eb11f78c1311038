"""The recorder: it writes one worker's memory and progress to a file, up to the worker's last moment.

docs/recorder-file.md describes the file's format. The engine's own thread samples between two steps; the recorder's
thread writes a heartbeat, the host's figures, and all threads' stacks when something takes long. It never touches
torch, the device or the garbage collector, and never waits for the engine's thread.
"""
