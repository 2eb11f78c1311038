"""The frozen values that all layers share: a worker's memory, the report, and what happened.

Bytes are integers, times are Unix seconds, ratios are 0 to 1; an unknown figure is ``None``, never 0. Pure, all of it.
"""
