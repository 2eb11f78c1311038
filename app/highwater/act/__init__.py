"""The policy: what is decided from a report and remembered of the engine's life.

``rules`` is what an operator may write, ``pressure`` how short each rank is by a rule, ``core`` the decision,
``memory`` what is remembered and how an action changes it, ``views`` the reasons and what is shown. ``governor`` feeds
it reports and has its actions run; ``store`` holds the policy in force. All but these two are pure.
"""
