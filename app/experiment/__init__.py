"""One experiment: a load, what the memory did under it, what each remedy gave back, and a report of all that.

::

    experiment    the frozen values          readings     what a sidecar tells, as those values
    series        what was read, bounded     sampler      reads the sidecar beside the load
    load          the command, its signals   interrupts   Ctrl-C, once and twice
    recording     the order of events        command      `highwater record`
    findings      what the numbers say       report       the blocks that both forms are made of
    page          the blocks as HTML         markdown     the blocks as Markdown
    chart         the timeline as SVG        files        where reports go, written in one step
    command_line  a command to show: without its secrets
"""
