"""Replacements for a model's modules: fused blocks, packed linear layers, rotary embedding."""
