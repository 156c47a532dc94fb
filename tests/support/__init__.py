"""Helpers that tests share: processes, reference outputs, a simulated GPU, small random models."""
