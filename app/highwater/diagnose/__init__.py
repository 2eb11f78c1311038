"""Conclusions from numbers and from the engine's log, and how they are written down.

::

    case       the rules' input, whatever it is made of     rules/     the rule book; book.py says what applies where
    finding    a finding, and advice: their words in TOML   change     how two readings of a rank differ
    incident   its evidence, and what is kept of it         experiment a measured load
    log/       the engine's log                             markdown   reports as Markdown, and as a page
    incidents/ what notices, opens, keeps and shows incidents
"""
