"""What is measured of a model before and between requests: step times, the vocabulary prior."""
