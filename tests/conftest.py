"""The two tiers of tests and how many examples a property gets in each.

`make test` runs what is not marked `slow`; each property gets the 30 examples of the profile
`fast`, the same in every run. `make test-slow` runs what is marked `slow`, and every property once
more with the 200 new examples of the profile `thorough`.
"""

from __future__ import annotations

import hypothesis
import pytest

# How long an example takes, or how long hypothesis needs to make it, says nothing of farspan.
NO_CLOCK = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fast", max_examples=30, derandomize=True, **NO_CLOCK)
hypothesis.settings.register_profile("thorough", max_examples=200, **NO_CLOCK)
hypothesis.settings.load_profile("fast")
#: Files and tests of half a minute and more in `make test`.
LONGEST = ("tests/test_readme.py", "tests/golden/test_golden.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs in `make test-slow`, not in `make test`")
    config.addinivalue_line("markers", "property: set on every test that hypothesis feeds")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.property)
    # The longest begin first: at the end of a run one process would wait for the other.
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
