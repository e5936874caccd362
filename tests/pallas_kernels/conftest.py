"""Fixtures of the kernel tests."""

from tests.mosaic_interpreter import interpreted

__all__ = ["interpreted"]
