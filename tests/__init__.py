"""The suite: mirrors the packages. Never installed."""
