"""How many examples the property tests draw: hypothesis profiles, and each test's share.

``fast`` (the default) draws a tenth, ``ci`` (``--hypothesis-profile=ci``; the second stage of
``.ci/run``) all, ``nightly`` five times as many, others each time. Dear tests say fewer.
"""

from hypothesis import settings

FACTORS = {"fast": 0.1, "ci": 1.0, "nightly": 5.0}
_FEWEST = 4


def register() -> None:
    """Make the profiles known, and take the fast one unless pytest is told another."""
    for name, factor in FACTORS.items():
        settings.register_profile(
            name,
            deadline=None,
            derandomize=name != "nightly",  # what CI says of a commit must not change
            max_examples=round(100 * factor),
        )
    settings.load_profile("fast")


def examples(number: int) -> int:
    """How many examples the profile in force draws where ``ci`` draws ``number``."""
    share = round(number * FACTORS[settings.get_current_profile_name()])
    return max(share, min(number, _FEWEST))
