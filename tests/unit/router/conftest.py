"""Property tests run on shared machines: a slow example is no failure."""

from hypothesis import settings

settings.register_profile("router", deadline=None)
settings.load_profile("router")
