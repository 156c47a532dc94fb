"""Measurements of a model taken before and between requests: step times and the vocabulary prior."""
