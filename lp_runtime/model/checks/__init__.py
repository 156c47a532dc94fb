"""Start-up checks that a model computes token trees or chains exactly as it computes plain text."""
