"""Incidents: what is kept when the engine dies, hangs, runs out of memory or fails to start, and what it means.

::

    watcher     notices and gathers             failed_starts   of starts, by files and log
    incidents   opens, repeats, closes          store           files, or memory
    diagnosis   makes one of its evidence
"""
