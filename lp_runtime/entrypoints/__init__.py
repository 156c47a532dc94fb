"""The commands lp-generate, lp-chat, lp-serve, lp-bench and lp-doctor."""
