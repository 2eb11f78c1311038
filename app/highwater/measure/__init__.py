"""A measured load: how memory changed under it, what each remedy freed, and a report of both.

::

    experiment    the frozen values              readings     the sidecar's responses as those values
    recording     the order of events            sampler      reads the sidecar beside the load
    load          the command, its signals       files        the reports' files, checked before
    rules         findings on a load             report       the report, as Markdown
    command_line  a command without its secrets
"""
