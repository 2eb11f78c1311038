"""A measured load: how memory changed under it, what each remedy freed, and a report of both.

::

    recording   the order of events             sampler   reads the sidecar beside the load, and what it responds
    load        the command, its signals        report    the report, as Markdown, and its files
"""
