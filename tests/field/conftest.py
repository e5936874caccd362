"""The library under test, once."""

import pytest

from tests.field import adapter as adapter_lib


@pytest.fixture(scope="module")
def adapter():
  return adapter_lib.Adapter()
