"""The recorder's writer: what one worker's memory was, and whether it made progress, up to its last moment.

docs/recorder.md is the file's form. The engine's own thread samples between two steps; a thread of ours writes a
heartbeat, the host's figures, and where everybody is when something takes long. That thread refuses to touch torch, the
device and the garbage collector, and to wait for the engine's.
"""
