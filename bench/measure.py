"""Samples and rows: how a figure is taken, and how it is told."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is against something measured in the same run, since machines drift."""

    what: str
    value: float
    unit: str
    samples: int
    target: str | None = None
    met: bool | None = None
    ratio: float | None = None
    against: str | None = None
    p95: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}


def times_ms(act: Callable[[], object], count: int, warm_up: int = 0) -> list[float]:
    """Milliseconds of each of `count` runs of `act`, after `warm_up` that are not counted."""
    for _ in range(warm_up):
        act()
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        act()
        samples.append((time.perf_counter() - start) * 1000)
    return samples


def p50(samples: list[float]) -> float:
    return statistics.median(samples)


def p95(samples: list[float]) -> float:
    return percentile(samples, 95)


def percentile(samples: list[float], per_cent: int) -> float:
    """The smallest sample that no more than this share of all is below."""
    return sorted(samples)[min(len(samples) - 1, len(samples) * per_cent // 100)]
