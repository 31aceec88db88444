"""Every test runs with the variables that engines of vLLM read."""

import pytest
import serving


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Sets ``serving.ENVIRONMENT``."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in serving.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
