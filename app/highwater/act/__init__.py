"""What acts: the policy, decided from a report and what is remembered of the engine's life, and the remedies it runs.

``rules`` is what an operator may write, ``pressure`` how short each rank is by a rule, ``decision`` the decision,
``state`` what is remembered and how an action changes it, ``views`` the reasons and what is shown: these are pure.
``governor`` feeds them reports, ``store`` holds the policy in force; ``relief`` runs one remedy of ``remedies`` at a
time, ``quiescer`` stops traffic for it.
"""
