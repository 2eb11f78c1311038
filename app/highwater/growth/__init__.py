"""Verdicts on growth: whether a series of memory is flat, levels off, made one step, or leaks, and what drives it."""
