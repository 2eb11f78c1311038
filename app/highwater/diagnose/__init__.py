"""Conclusions from numbers and from the engine's log, and how they are written down.

::

    evidence   what is known when something happens     case       the rules' input, of an incident or a load
    rules/     the rule book                            finding    a finding; its sentences in findings.toml
    advice     settings, in advice.toml                 budget     the findings on a start's budget
    log/       the engine's log                         markdown   reports as Markdown, and as a page
    incidents/ what is kept when it dies, hangs, runs out of memory or fails to start
"""
