"""Accounting of a rank's memory: its components, growth, and what a remedy freed. Pure, all of it: no I/O, no clock."""
