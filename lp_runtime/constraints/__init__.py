"""Constraints on the new text: compiled grammars and their state on a token tree, with xgrammar."""
