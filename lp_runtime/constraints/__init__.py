"""Constraints of the new text: compiled grammars, and their state on a token tree. The only home of xgrammar."""
