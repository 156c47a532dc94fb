"""Rows of lp-bench's report: one per method and assumed exchange, over all prompts or those of a task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from lp_runtime.bench.methods import Result


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (lower quartile, median, upper quartile) of at least one value."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of a row.

    All values but the quartiles are medians over requests; decode values, over requests of more than one token. A value
    that was not measured is None.

    Attributes:
        tokens_per_second: of whole requests, the prefill included.
        lower_quartile, upper_quartile: of tokens per second over requests.
        over_base: ratio to the first method's tokens per second.
        prefill_ms: milliseconds to the first token.
        decode_tokens_per_second: tokens per second after the first token.
        decode_over_base: ratio to the first method's decode tokens per second.
    """

    tokens_per_second: float
    lower_quartile: float
    upper_quartile: float
    over_base: float
    prefill_ms: float | None
    decode_tokens_per_second: float | None
    decode_over_base: float | None

    @classmethod
    def of(cls, of_method: list[Result], exchange_us: float | None, of_base: list[Result]) -> Speeds:
        """Compute the speeds of a method's results at an assumed exchange, relative to the base method's."""
        rates = [len(result.token_ids) / result.seconds[exchange_us] for result in of_method]
        base_rates = [len(result.token_ids) / min(result.seconds.values()) for result in of_base]
        lower, median, upper = quartiles(rates)
        over_base = statistics.median(rate / base_rate for rate, base_rate in zip(rates, base_rates, strict=True))
        decode_rates = [_decode_rate(result, result.seconds[exchange_us]) for result in of_method]
        base_decode_rates = [_decode_rate(result, min(result.seconds.values())) for result in of_base]
        ratios = [
            None if one is None or base is None else one / base
            for one, base in zip(decode_rates, base_decode_rates, strict=True)
        ]
        prefill = _known((result.prefill_seconds for result in of_method), statistics.median)
        return cls(
            tokens_per_second=median,
            lower_quartile=lower,
            upper_quartile=upper,
            over_base=over_base,
            prefill_ms=None if prefill is None else 1000 * prefill,
            decode_tokens_per_second=_known(decode_rates, statistics.median),
            decode_over_base=_known(ratios, statistics.median),
        )


def _decode_rate(result: Result, seconds: float) -> float | None:
    """Return the tokens per second after a request's first token; None if that was not measured."""
    if result.prefill_seconds is None or len(result.token_ids) < 2:
        return None
    return (len(result.token_ids) - 1) / max(1e-9, seconds - result.prefill_seconds)


def _known(figures: Iterable[float | None], summarize: Callable[[list[float]], float]) -> float | None:
    """Summarize the figures that are not None; None if all are."""
    values = [value for value in figures if value is not None]
    return summarize(values) if values else None


@dataclass(frozen=True)
class Steps:
    """Step statistics of a row, over all its requests. A value that was not measured is None.

    Attributes:
        S: compression ratio: new tokens / steps.
        num_tokens: new tokens.
        num_steps: steps, prefills included.
        tokens_a_step: mean number of tokens fed in a step.
        step_ms: milliseconds per step, prefills included.
        other_share, other_us: medians of Result's.
    """

    S: float
    num_tokens: int
    num_steps: int
    tokens_a_step: float | None
    step_ms: float
    other_share: float | None
    other_us: float | None

    @classmethod
    def of(cls, of_method: list[Result], exchange_us: float | None) -> Steps:
        """Compute the step statistics of a method's results at an assumed exchange."""
        num_tokens = sum(len(result.token_ids) for result in of_method)
        num_steps = sum(result.num_steps for result in of_method)
        return cls(
            S=num_tokens / num_steps,
            num_tokens=num_tokens,
            num_steps=num_steps,
            tokens_a_step=_known((result.step_tokens for result in of_method), statistics.mean),
            step_ms=1000 * sum(result.seconds[exchange_us] for result in of_method) / num_steps,
            other_share=_known((result.other_share for result in of_method), statistics.median),
            other_us=_known((result.other_us for result in of_method), statistics.median),
        )


@dataclass(frozen=True)
class Row:
    """Results of one method at one assumed exchange.

    Attributes:
        label: the method's name in the table and the plot.
        exchange_us: assumed microseconds of a step's exchange; None if none is assumed.
        outputs_that_differ: number of requests whose tokens differ from the first method's.
    """

    method: str
    label: str
    replicas: int
    exchange_us: float | None
    speeds: Speeds
    steps: Steps
    outputs_that_differ: int

    def as_json(self, base: str) -> dict[str, str | int | float | None]:
        """Return the row as a flat object for bench.json, with ratios in `over_BASE` and `decode_over_BASE`."""
        speeds = asdict(self.speeds)
        for name in ("over_base", "decode_over_base"):
            speeds[name.replace("base", base)] = speeds.pop(name)
        return {
            "method": self.method,
            "label": self.label,
            "replicas": self.replicas,
            "exchange_us": self.exchange_us,
            **speeds,
            **asdict(self.steps),
            "outputs_that_differ": self.outputs_that_differ,
        }

    def cells(self) -> list[str]:
        """Return the row's cells in the table over all prompts; see report.HEADER."""
        speeds, steps = self.speeds, self.steps
        return [
            self.label,
            str(self.replicas),
            "" if self.exchange_us is None else f"{self.exchange_us:g}, assumed",
            f"{speeds.tokens_per_second:.1f} ({speeds.lower_quartile:.1f} to {speeds.upper_quartile:.1f})",
            f"{speeds.over_base:.2f}",
            _shown(speeds.prefill_ms, ".0f"),
            self.decode_cell(),
            f"{steps.S:.2f}",
            _shown(steps.tokens_a_step, ".1f"),
            f"{steps.step_ms:.2f}",
            "" if steps.other_share is None else f"{100 * steps.other_share:.1f}%, {steps.other_us:.0f} us",
            str(self.outputs_that_differ),
        ]

    def task_cells(self) -> list[str]:
        """Return the row's cells in the table by task, after task and method; see report.TASK_HEADER."""
        speeds, steps = self.speeds, self.steps
        return [
            f"{steps.S:.2f}",
            f"{steps.num_tokens} / {steps.num_steps}",
            f"{speeds.tokens_per_second:.1f}",
            f"{speeds.over_base:.2f}",
            _shown(speeds.prefill_ms, ".0f"),
            self.decode_cell(),
        ]

    def decode_cell(self) -> str:
        """Return the decode tokens per second, with the ratio to the first method's in parentheses."""
        speeds = self.speeds
        if speeds.decode_tokens_per_second is None:
            return ""
        over = "" if speeds.decode_over_base is None else f" ({speeds.decode_over_base:.2f})"
        return f"{speeds.decode_tokens_per_second:.1f}{over}"


def _shown(value: float | None, form: str) -> str:
    """Format a figure; empty for None."""
    return "" if value is None else format(value, form)
