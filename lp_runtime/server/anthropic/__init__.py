"""Request and response bodies of Anthropic's Messages API."""
