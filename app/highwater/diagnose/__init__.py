"""Conclusions from numbers and from the engine's log.

::

    case       the rules' input, whatever it is made of     rules/     the rule book; book.py says what applies where
    finding    a finding, and advice: their words in TOML   experiment a measured load, and how two readings differ
    incident   its evidence, and what is kept of it         incidents/ what notices, opens, concludes and keeps them
    log/       the engine's log                             verdict    the one verdict; engine_verdict: of its state
"""
