"""Data classes of a request: Request, StepOutput, Report, Generation."""
