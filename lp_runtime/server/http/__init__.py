"""HTTP plumbing: limits on connections, access checks, error bodies, and the settings for them."""
