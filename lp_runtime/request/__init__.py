"""Data classes of a request: RequestOptions, Request, StepOutput, Report, Generation."""
