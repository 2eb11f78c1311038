"""Conclusions from the numbers, and how they are written down: for incidents and for measured loads alike.

::

    finding     a finding, and the advice that it gives      advice     known settings, and what each costs
    case        the ranks at their moments: the rules' input rules      one question each, with one threshold
    markdown    reports as Markdown, and the page of it      leaks      the rule about leaks
"""
