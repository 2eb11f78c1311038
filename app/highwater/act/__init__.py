"""The policy, which decides from each report whether memory must be given back, and the remedies that do it.

Pure are ``rules`` (what an operator may write), ``pressure`` (how short each rank is by a rule), ``decision``,
``state`` (what is remembered of the engine's life) and ``views`` (the reasons in words, and what is shown).
``governor`` decides on every report and keeps the policy in force. ``relief`` runs one of the ``remedies`` at a time,
in the states that ``quiescer`` draws, which holds requests where one needs that. ``door`` limits the images that are
under way.
"""
