"""Messages between the driver and its replicas."""
