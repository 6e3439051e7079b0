"""What holds for all tests."""

from hypothesis import settings

# machines that run tests are shared: how long one example takes says nothing
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
