"""Incidents: what is kept when the engine dies, hangs, runs out of memory or fails to start, and what it means.

::

    watcher     notices and gathers             incidents   opens, repeats, closes
    diagnosis   weighs findings, the summary    oom_kills   the kernel's kills for memory
    store       files, or memory                text        an incident as Markdown
"""
