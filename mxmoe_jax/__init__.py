"""MXFP8 mixture-of-experts training for JAX."""
