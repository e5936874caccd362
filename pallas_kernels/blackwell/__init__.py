"""Kernels for Blackwell's block-scaled tensor cores (tcgen05)."""
