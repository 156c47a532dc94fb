"""A check for dead ends of a grammar: texts that can be begun, but that no vocabulary can complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lp_runtime.constraints.exact_regexes import (
    MAX_CODE_POINT,
    UNESCAPED_IN_JSON,
    UNICODE,
    complement,
    exact_regex,
    intersection,
)

# Kinds of grammar expressions, with xgrammar's numbers (GrammarExprType in its cpp/grammar_impl.h).
BYTES, CLASS, CLASS_STAR, EMPTY, RULE_REF, SEQUENCE, CHOICES, TAG_DISPATCH, REPEAT = range(9)
TOKEN_TAG_DISPATCH, REGEX = 11, 12


def has_automaton(grammar: Any) -> bool:
    """Whether a grammar has a regular expression that xgrammar compiles to an automaton."""
    return any(code == REGEX for code, _ in _expressions(json.loads(grammar.serialize_json())))


def _expressions(content: Any) -> list[tuple[int, Sequence[int]]]:
    """Return (kind, values) of the expressions of a serialized grammar."""
    data = content["grammar_expr_data"]
    return [(data[start], data[start + 2 : start + 2 + data[start + 1]]) for start in content["grammar_expr_indptr"]]


class GrammarParts:
    """Analysis of an unoptimized xgrammar Grammar: which expressions a text can complete, and which begin."""

    def __init__(self, grammar: Any):
        content = json.loads(grammar.serialize_json())
        self._expressions = _expressions(content)
        self._bodies: list[int] = [rule[1] for rule in content["rules"]]
        self._names: list[str] = [rule[0] for rule in content["rules"]]
        self._root: int = content["root_rule_id"]
        self._regexes = self._parsed_regexes(grammar)
        self._rule_users = self._users()
        self._ending: set[int] = set()  # rules that some text can complete
        self._beginning: set[int] = set()  # rules that some text can begin, with at least one character
        self._grow(self._ending, self._ends)
        self._grow(self._beginning, self._begins)
        self.can_end = self._root in self._ending
        self.can_begin = self._root in self._beginning  # at least the first character of some text

    def dead_end(self) -> str | None:
        """Describe a dead end of the grammar; None if every text that can be begun can be completed.

        `loop ::= "a" loop` has one. A part that no text can begin is harmless: `root ::= "a" | []` allows `a`.
        """
        if not self.can_end:
            return f"no text can satisfy it: {self._reason(self._bodies[self._root], self._root)}"
        reason = self._reason_of_trap()
        return None if reason is None else f"it allows a beginning that no text can end: {reason}"

    def _reason_of_trap(self) -> str | None:
        """Describe why some text can be begun but not completed; None if there is none. Requires `can_end`."""
        reached, todo = {self._root}, [(self._bodies[self._root], self._root)]
        while todo:
            expression, rule = todo.pop()
            if not self._ends(expression):
                if self._begins(expression):
                    return self._reason(expression, rule)
                continue
            inner = self._regexes.get(expression)
            if inner is not None and inner.dead_end() is not None:
                return self._no_character(rule)
            code, values = self._expressions[expression]
            if code in (SEQUENCE, CHOICES):
                todo += [(each, rule) for each in values]
            for each in self._references(code, values):
                # A tag of a dispatch is complete before its rule begins, so the text has already begun.
                if code in (TAG_DISPATCH, TOKEN_TAG_DISPATCH) and each not in self._ending:
                    return self._reason(self._bodies[each], each)
                if each not in reached:
                    reached.add(each)
                    todo.append((self._bodies[each], each))
        return None

    def _parsed_regexes(self, grammar: Any) -> dict[int, GrammarParts]:
        """Analyze each embedded regular expression, except those that xgrammar cannot convert to a grammar."""
        parts = {}
        for expression, (code, values) in enumerate(self._expressions):
            if code != REGEX:
                continue
            in_json, pattern = values[0], bytes(value % 256 for value in values[1:]).decode(errors="replace")
            try:
                parsed = type(grammar).from_regex(exact_regex(pattern, UNESCAPED_IN_JSON if in_json else UNICODE))
            except (RuntimeError, ValueError):  # xgrammar's automata support more than its grammars, such as (?i)
                continue
            parts[expression] = GrammarParts(parsed)
        return parts

    def _users(self) -> list[list[int]]:
        """Return for each rule the rules whose bodies refer to it."""
        users: list[list[int]] = [[] for _ in self._bodies]
        for rule, body in enumerate(self._bodies):
            todo = [body]
            while todo:
                code, values = self._expressions[todo.pop()]
                todo += values if code in (SEQUENCE, CHOICES) else ()
                for each in self._references(code, values):
                    users[each].append(rule)
        return users

    def _grow(self, rules: set[int], holds: Callable[[int], bool]) -> None:
        """Add rules whose bodies satisfy `holds`, up to the fixed point, because bodies refer to other rules."""
        todo = list(range(len(self._bodies)))
        while todo:
            rule = todo.pop()
            if rule not in rules and holds(self._bodies[rule]):
                rules.add(rule)
                todo += self._rule_users[rule]

    def _ends(self, expression: int) -> bool:
        """Whether some text can complete an expression, given the rules in `_ending` so far."""
        code, values = self._expressions[expression]
        if code == CLASS:
            return self._has_character(values)
        if code == RULE_REF:
            return values[0] in self._ending
        if code == REPEAT:
            return values[1] == 0 or values[0] in self._ending
        if code in (SEQUENCE, CHOICES):
            return (all if code == SEQUENCE else any)(map(self._ends, values))
        inner = self._regexes.get(expression)
        return inner is None or inner.can_end

    def _begins(self, expression: int) -> bool:
        """Whether some text can begin an expression, completed or not, given the rules in `_beginning` so far."""
        code, values = self._expressions[expression]
        if code == BYTES:
            return bool(values)
        if code in (CLASS, CLASS_STAR):
            return self._has_character(values)
        if code in (RULE_REF, REPEAT):
            return any(rule in self._beginning for rule in self._references(code, values))
        if code == CHOICES:
            return any(map(self._begins, values))
        if code == SEQUENCE:
            return self._sequence_begins(values)
        inner = self._regexes.get(expression)
        return code != EMPTY and (inner is None or inner.can_begin)

    def _sequence_begins(self, expressions: Sequence[int]) -> bool:
        """Whether some text can begin a sequence: one of its expressions, if all before it can be empty."""
        for each in expressions:
            if self._begins(each):
                return True
            if not self._ends(each):
                return False
        return False

    def _references(self, code: int, values: Sequence[int]) -> Sequence[int]:
        """Return the rules that an expression refers to, without those repeated at most 0 times."""
        if code == TAG_DISPATCH:  # (tag, rule) pairs, then two values
            return values[1:-2:2]
        if code == TOKEN_TAG_DISPATCH:  # number of pairs, (token, rule) pairs, then others
            return values[2 : 2 * values[0] + 1 : 2]
        return values[:1] if code == RULE_REF or (code == REPEAT and values[2] != 0) else ()

    def _has_character(self, values: Sequence[int]) -> bool:
        is_negated, ranges = values[0], list(zip(values[1::2], values[2::2], strict=True))
        return bool(complement(ranges) if is_negated else intersection(ranges, [(0, MAX_CODE_POINT)]))

    def _no_character(self, rule: int) -> str:
        return f"the rule {self._names[rule]} has a position where no character is allowed"

    def _reason(self, expression: int, rule: int) -> str:
        """Describe why no text can complete an expression of a rule."""
        passed = {rule}
        while True:
            code, values = self._expressions[expression]
            if code in (SEQUENCE, CHOICES):
                expression = next(each for each in values if not self._ends(each))
            elif code not in (RULE_REF, REPEAT):
                return self._no_character(rule)
            elif values[0] in passed:
                return f"the rule {self._names[values[0]]} never ends"
            else:
                rule = values[0]
                passed.add(rule)
                expression = self._bodies[rule]
