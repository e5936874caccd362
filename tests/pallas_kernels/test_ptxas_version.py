"""Mosaic's question for ptxas's version is asked once."""

import types

import jax
import pytest

from pallas_kernels import ptxas_version

NAME = "_get_ptxas_isa_version"


@pytest.fixture
def asked(monkeypatch):
  """Calls that reach a stand-in for JAX's own function."""
  found = []
  extension = types.SimpleNamespace(**{NAME: lambda: found.append(1) or 92})
  monkeypatch.setattr(ptxas_version, "extension", lambda: extension)
  return extension, found


def test_the_version_is_asked_for_once(asked):
  extension, calls = asked
  assert ptxas_version.remember()
  assert ptxas_version.remember()  # again: nothing more
  assert [getattr(extension, NAME)() for _ in range(3)] == [92] * 3
  assert len(calls) == 1


def test_another_jax_is_left_alone(asked, monkeypatch):
  extension, calls = asked
  before = getattr(extension, NAME)
  monkeypatch.setattr(jax, "__version__", "0.12.0")
  assert not ptxas_version.remember()
  assert getattr(extension, NAME) is before
  assert calls == []


def test_nothing_happens_without_a_cuda_plugin(monkeypatch):
  monkeypatch.setattr(ptxas_version, "extension", lambda: None)
  assert not ptxas_version.remember()


def test_this_jax_still_asks_where_the_module_looks():
  if ptxas_version.extension() is None:
    pytest.skip("no CUDA plugin is installed")
  from pallas_kernels import mosaic  # noqa: F401

  version = getattr(ptxas_version.extension(), NAME)
  before = version.cache_info().hits
  version(), version()
  assert version.cache_info().hits > before
