"""Training experiments on the MXFP8 mixture-of-experts layer.

``python -m experiments.run CONFIG.py`` from the root of a clone. The package
is never installed; it has this file because a regular package of the same
name elsewhere on the path would otherwise be imported in its place.
"""
