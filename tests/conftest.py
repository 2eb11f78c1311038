"""What holds for every test."""

from hypothesis import settings

# A machine that is busy with something else makes an example slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
