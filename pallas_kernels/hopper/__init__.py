"""Kernels for Hopper's tensor cores (wgmma): grouped matmul and wgrad."""
