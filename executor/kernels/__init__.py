"""Triton kernels, one per file with its launcher and a plain-torch twin, and the metadata that they read."""
