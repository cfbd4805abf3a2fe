"""Kernels in CUDA C++, compiled at start by NVRTC: how they are compiled, kept, launched and checked."""
