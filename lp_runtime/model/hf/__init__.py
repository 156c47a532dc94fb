"""Facts read from a Hugging Face model: configuration, modules, rotary lengths."""
