"""Kernels of Triton for GPUs and of Numba for CPUs, and when each can be used."""
