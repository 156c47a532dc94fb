"""The default drafter: trees grown best first, from every source of candidates that costs no forward pass."""
