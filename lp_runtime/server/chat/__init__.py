"""Chat templates, tool calls and reasoning parts."""
