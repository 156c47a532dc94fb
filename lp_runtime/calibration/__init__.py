"""Measurements of a model taken at start: step times and the vocabulary prior."""
