"""A measured load: what the memory did under it, what each remedy gave back, and a report of all that.

::

    experiment    the frozen values          readings     what a sidecar reports, as those values
    series        what was read, bounded     sampler      reads the sidecar beside the load
    load          the command, its signals   interrupts   Ctrl-C, once and twice
    recording     the order of events        command      `highwater measure`
    rules         what the numbers say       report       the report, as Markdown
    files         the reports' files, checked before   command_line  a command without its secrets
"""
