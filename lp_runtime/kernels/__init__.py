"""Kernels: Triton's for GPUs and Numba's for CPUs, and where each can be used."""
