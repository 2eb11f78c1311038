"""The verb ``plan``: its command line, what a start measured, and its text."""
