"""The flight recorder's writer: what one worker's memory was, and whether it moved, up to its last moment.

docs/recorder.md is the file's form. One thread samples and writes; it reads counters and metadata as `memory` does. It
refuses to copy, to allocate on the device, to empty a cache, and to wait for the engine's main thread.
"""
