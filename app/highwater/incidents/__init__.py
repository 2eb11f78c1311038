"""Incidents: what is kept when the engine dies, hangs, runs out of memory or fails to start, and what it means.

::

    watcher     notices and gathers                 incidents   opens, repeats, closes
    enginelog   the engine's log and its lines      starts      starts that failed, by the log
    messages    known messages (messages.toml)      oom_kills   the kernel's kills for memory
    incident    the frozen values                   diagnosis   evidence as a case, findings, the summary
    rules       rules beside the rule book          store       files, or memory
    text        an incident as Markdown
"""
