"""Dividing a token tree between replicas."""
