"""Kernels: PyTorch definitions, and C for CPUs."""
