"""The default drafter: trees grown best first from everything that is known for free."""
