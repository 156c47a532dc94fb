"""The default drafter: trees grown best first from all candidates that need no forward pass."""
