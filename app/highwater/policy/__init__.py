"""The policy: what is decided from a report and remembered of the engine's life.

``rules`` is what an operator may write, ``waters`` where the default rule acts, ``pressure`` how short each rank is by
a rule, ``gains`` what a remedy can give, ``core`` the decision, ``tidying`` that of an idle engine, ``memory`` what is
remembered, ``learning`` how it changes, ``wording`` the reasons. ``governor`` feeds it reports and has its
actions run; ``settings`` and ``store`` hold the policy in force. All but ``governor`` and ``store`` are pure.
"""
