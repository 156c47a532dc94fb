"""The rows of lp-bench's report: one a method and assumed exchange, over all prompts or those of one task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from lp_runtime.bench.methods import Result


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile of one or more values."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of a row.

    Attributes:
        tokens_per_second: median over requests.
        lower_quartile: of tokens per second over requests.
        upper_quartile: of tokens per second over requests.
        over_base: median, over requests, of the ratio to the first method's tokens per second.
        prefill_ms: median, over requests, of the milliseconds to the first token; None where it is not known.
        decode_tokens_per_second: median, over requests of more than one token, of the tokens behind the first one per
            second after it; None where it is not known.
        decode_over_base: median, over requests of more than one token, of the ratio to the first method's tokens per
            second behind the first token; None where it is not known.
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
        """Return the speeds of a method's results at an assumed exchange, beside the first method's results."""
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
    """Return the tokens behind a request's first one per second after it; None where that is not known."""
    if result.prefill_seconds is None or len(result.token_ids) < 2:
        return None
    return (len(result.token_ids) - 1) / max(1e-9, seconds - result.prefill_seconds)


def _known(figures: Iterable[float | None], summarize: Callable[[list[float]], float]) -> float | None:
    """Return a summary of the figures that are known; None if none is."""
    values = [value for value in figures if value is not None]
    return summarize(values) if values else None


@dataclass(frozen=True)
class Steps:
    """Steps of a row, over all its requests.

    Attributes:
        S: compression ratio: new tokens / steps.
        num_tokens: new tokens.
        num_steps: steps, prefills included.
        tokens_a_step: mean of the tokens fed in a step; None where it is not known.
        step_ms: milliseconds a step, the prefill included.
        other_share: median of Result.other_share; None where it is not known.
        other_us: median of Result.other_us; None where it is not known.
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
        """Return the compression ratio, and tokens and time of a step, of a method's results at an assumed exchange."""
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
    """One method at one assumed exchange.

    Attributes:
        method: the method's name.
        label: the method's name in the table and the plot.
        replicas: number of replicas.
        exchange_us: assumed microseconds of a step's exchange; None where none is assumed.
        speeds: tokens per second.
        steps: compression ratio, and tokens and time of a step.
        outputs_that_differ: number of requests whose tokens are not the first method's.
    """

    method: str
    label: str
    replicas: int
    exchange_us: float | None
    speeds: Speeds
    steps: Steps
    outputs_that_differ: int

    def as_json(self, base: str) -> dict[str, str | int | float | None]:
        """Return the row as bench.json has it: flat, with the speeds over the first method's by the keys `over_BASE`
        and `decode_over_BASE`."""
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
        """Return the row as the table over all prompts shows it; see report.HEADER."""
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
        """Return the row as the table by task shows it, behind task and method; see report.TASK_HEADER."""
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
        """Return the tokens per second behind the first token, and over the first method's in brackets."""
        speeds = self.speeds
        if speeds.decode_tokens_per_second is None:
            return ""
        over = "" if speeds.decode_over_base is None else f" ({speeds.decode_over_base:.2f})"
        return f"{speeds.decode_tokens_per_second:.1f}{over}"


def _shown(value: float | None, form: str) -> str:
    """Return a figure as text; nothing where it is not known."""
    return "" if value is None else format(value, form)
