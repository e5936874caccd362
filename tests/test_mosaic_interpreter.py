"""The interpreter extension is pinned, and leaves nothing behind."""

import pytest

from tests import mosaic_interpreter


@pytest.mark.parametrize(
  ("version", "source"),
  [
    ("0.11.3", mosaic_interpreter.PINNED_HASH),
    (mosaic_interpreter.PINNED_VERSION, "0" * 12),
  ],
)
def test_another_jax_is_refused(version, source):
  with pytest.raises(RuntimeError, match="private functions of JAX"):
    mosaic_interpreter.check_pin(version, source)


def test_nothing_stays_installed():
  before = mosaic_interpreter.upstream_hash()
  names = mosaic_interpreter.replacements()
  saved = [getattr(owner, name) for owner, name, _ in names]
  mosaic_interpreter.install()()
  assert saved == [getattr(owner, name) for owner, name, _ in names]
  assert mosaic_interpreter.upstream_hash() == before
