"""The commands. Each speaks to a sidecar's URL and knows nothing that the sidecar does not report.

What came over the wire is made plain before it is drawn: a terminal obeys control characters, whoever sent them.
"""
