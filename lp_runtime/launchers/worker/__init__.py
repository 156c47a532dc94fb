"""What runs inside a replica's process."""
