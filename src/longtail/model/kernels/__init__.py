"""Kernels: PyTorch definitions, C for CPUs, Triton for GPUs."""
