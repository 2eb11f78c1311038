"""Conclusions from the numbers, and how they are written down: for incidents and for measured loads alike.

::

    finding     a finding, and its sentences in findings.toml     advice     settings, in advice.toml
    case        the rules' input                                  rules      the rule book
    budget      the findings on a start's budget                  markdown   reports as Markdown, and as a page
"""
