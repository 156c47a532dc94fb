"""Code that runs inside a replica's process."""
