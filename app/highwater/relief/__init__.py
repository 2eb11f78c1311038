"""Runs one remedy at a time; ``relief`` draws the states that it passes through.

``relief`` runs a remedy, measures it and writes down how it ended, ``quiescer`` keeps requests away from it,
``remedies`` are what can be run.
"""
