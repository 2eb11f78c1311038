"""Runs one remedy at a time; ``states`` draws what a relief passes through.

``relief`` runs a remedy and measures it, ``quiescer`` keeps requests away from it, ``remedy_log`` writes down how it
ended, ``remedies`` are what can be run.
"""
