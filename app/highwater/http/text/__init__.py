"""The sidecar's answers as text, one renderer for each report: ``?format=text`` and the terminal show the same."""
