"""The workers' recorders: their folder and files read, and whether the ranks make progress by them."""
