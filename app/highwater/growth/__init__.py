"""Verdicts on growth: a series of memory is flat, levels off, makes one step, or leaks, and something drives it."""
