"""Rows of lp-bench's report: one per method and assumed exchange, over all prompts or those of a task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from lp_runtime.bench.methods import Result


@dataclass(frozen=True)
class Row:
    """Results of one method at one assumed exchange.

    Speeds are medians over requests, and decode speeds over requests of more than one token. Ratios are to the first
    method, on the same prompt and round. A value that was not measured is None.
    """

    method: str
    label: str  # the method's name in the table and the plot
    replicas: int
    exchange_us: float | None  # assumed microseconds of a step's exchange
    tokens_per_second: float  # of whole requests, prefills included, as their quartiles
    lower_quartile: float
    upper_quartile: float
    over_base: float | None
    prefill_ms: float | None  # to the first token
    decode_tokens_per_second: float | None  # after the first token
    decode_over_base: float | None
    S: float  # compression ratio: new tokens / steps, over all requests
    num_tokens: int
    num_steps: int  # prefills included
    tokens_a_step: float | None  # fed, mean
    step_ms: float  # prefills included
    other_share: float | None  # median of Result's, as the next
    other_us: float | None
    outputs_that_differ: int  # requests whose tokens differ from the first method's

    def as_json(self, base: str) -> dict[str, str | int | float | None]:
        """Return the row as an object for bench.json, with ratios in `over_BASE` and `decode_over_BASE`."""
        return {name.replace("over_base", f"over_{base}"): value for name, value in asdict(self).items()}

    def full_label(self) -> str:
        """Return the label with the number of replicas and the assumed exchange."""
        replicas = f" x {self.replicas}" if self.replicas > 1 else ""
        return self.label + replicas + ("" if self.exchange_us is None else f", {self.exchange_us:g} us")

    def decode_cell(self) -> str:
        """Return the decode tokens per second, with the ratio to the first method's in parentheses."""
        over = "" if self.decode_over_base is None else f" ({self.decode_over_base:.2f})"
        return "" if self.decode_tokens_per_second is None else f"{self.decode_tokens_per_second:.1f}{over}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# Columns of the table over all prompts; {base} stands for the first method.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.label,
    "replicas": lambda row: str(row.replicas),
    "exchange us": lambda row: "" if row.exchange_us is None else f"{row.exchange_us:g}, assumed",
    "tokens/s (quartiles)": lambda row: (
        f"{row.tokens_per_second:.1f} ({row.lower_quartile:.1f} to {row.upper_quartile:.1f})"
    ),
    "over {base}": lambda row: _shown(row.over_base, ".2f"),
    "prefill ms": lambda row: _shown(row.prefill_ms, ".0f"),
    "decode tokens/s (over {base})": Row.decode_cell,
    "S": lambda row: f"{row.S:.2f}",
    "tokens a step": lambda row: _shown(row.tokens_a_step, ".1f"),
    "step ms": lambda row: f"{row.step_ms:.2f}",
    "host": lambda row: "" if row.other_share is None else f"{100 * row.other_share:.1f}%, {row.other_us:.0f} us",
    "outputs that differ": lambda row: str(row.outputs_that_differ),
}
# Columns of the table by task, after the task.
TASK_COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": Row.full_label,
    "S": COLUMNS["S"],
    "tokens / steps": lambda row: f"{row.num_tokens} / {row.num_steps}",
    "tokens/s": lambda row: f"{row.tokens_per_second:.1f}",
    **{name: COLUMNS[name] for name in ("over {base}", "prefill ms", "decode tokens/s (over {base})")},
}


def row_of(
    method: str, label: str, replicas: int, exchange_us: float | None, of_method: list[Result], of_base: list[Result]
) -> Row:
    """Compute the row of a method's results at an assumed exchange, relative to the base method's results."""
    seconds = [each.seconds[exchange_us] for each in of_method]
    rates, decode_rates = _rates(of_method, seconds)
    base_rates, base_decode_rates = _rates(of_base, [min(each.seconds.values()) for each in of_base])
    lower, median, upper = quartiles(rates)
    num_tokens, num_steps = sum(len(each.token_ids) for each in of_method), sum(each.num_steps for each in of_method)
    pairs = zip(of_method, of_base, strict=True)
    return Row(
        method=method,
        label=label,
        replicas=replicas,
        exchange_us=exchange_us,
        tokens_per_second=median,
        lower_quartile=lower,
        upper_quartile=upper,
        over_base=_known(_ratios(rates, base_rates)),
        prefill_ms=_known(1000 * each.prefill_seconds for each in of_method if each.prefill_seconds is not None),
        decode_tokens_per_second=_known(decode_rates),
        decode_over_base=_known(_ratios(decode_rates, base_decode_rates)),
        S=num_tokens / num_steps,
        num_tokens=num_tokens,
        num_steps=num_steps,
        tokens_a_step=_known((each.step_tokens for each in of_method), statistics.mean),
        step_ms=1000 * sum(seconds) / num_steps,
        other_share=_known(each.other_share for each in of_method),
        other_us=_known(each.other_us for each in of_method),
        outputs_that_differ=sum(one.token_ids != other.token_ids for one, other in pairs),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (lower quartile, median, upper quartile) of at least one value."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def _rates(results: list[Result], seconds: list[float]) -> tuple[list[float], list[float | None]]:
    """Return tokens per second of whole requests, and after the first token (None if not measured)."""
    pairs = list(zip(results, seconds, strict=True))
    after_first = [
        None
        if each.prefill_seconds is None or len(each.token_ids) < 2
        else (len(each.token_ids) - 1) / max(1e-9, time - each.prefill_seconds)
        for each, time in pairs
    ]
    return [len(each.token_ids) / time for each, time in pairs], after_first


def _ratios(ones: Sequence[float | None], bases: Sequence[float | None]) -> list[float | None]:
    pairs = zip(ones, bases, strict=True)
    return [None if one is None or base is None else one / base for one, base in pairs]


def _known(
    figures: Iterable[float | None], summarize: Callable[[list[float]], float] = statistics.median
) -> float | None:
    """Summarize the figures that are not None; None if all are."""
    values = [value for value in figures if value is not None]
    return summarize(values) if values else None
