"""What the commands do: lp-generate, lp-chat, lp-serve and lp-bench."""
