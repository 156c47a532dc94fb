"""The syntax of chats: formats of tool calls and reasoning, their parsers and their constraints."""
