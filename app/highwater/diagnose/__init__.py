"""Conclusions from numbers and from the engine's log.

::

    case       the rules' input, whatever it is made of     rules/     the rule book; book.py says what applies where
    evidence   an incident's, a load's; readings compared   incidents/ what notices, opens, concludes and keeps them
    finding    a finding, and advice: their words in TOML   verdict    the one verdict; engine_verdict: of its state
    log/       the engine's log
"""
