"""``anaphora bench --capacity``: how many model units this machine has, kept for the server."""

from __future__ import annotations

import dataclasses

import msgspec
from rich.console import Console

from anaphora.bench.report import Report
from anaphora.bench.run import BenchOptions, run
from anaphora.capacity import UNIT_TOKENS_PER_SECOND, Capacity, CapacityFile
from anaphora.errors import ConfigError, MeasurementError
from anaphora.loaders.sources import capacity_path, name_of

_MAX_SPREAD = 0.15
_INPUT, _OUTPUT = "prefill-512", "decode-32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapacityReport:
    """The figures behind a unit, and where they are kept."""

    measured: Report
    capacity: Capacity
    path: str

    def show(self, console: Console) -> None:
        """The tables, and what follows."""
        self.measured.show(console)
        capacity = self.capacity
        if (spread := max(line.spread for line in self.measured.lines)) > _MAX_SPREAD:
            console.print(
                f"[yellow]The repeats differ by {spread:.0%}: the machine had other work. Measure "
                "again when it is idle.[/yellow]"
            )
        console.print(
            f"[bold]{capacity.model_units} model units[/bold] of {UNIT_TOKENS_PER_SECOND:g} tokens "
            f"a second each; an output token counts as {capacity.output_weight:.2f} input tokens.\n"
            f"Kept in {self.path}; anaphora.yaml may now sell nine tenths of them."
        )

    def to_json(self) -> bytes:
        """One line."""
        capacity = {
            **dataclasses.asdict(self.capacity),
            "model_units": self.capacity.model_units,
            "output_weight": self.capacity.output_weight,
        }
        return msgspec.json.encode(
            {"capacity": capacity, **msgspec.json.decode(self.measured.to_json())}
        )


async def measure_capacity(options: BenchOptions) -> CapacityReport:
    """Prefill and decode of our own server, alone on the machine.

    Raises ``ConfigError`` with a URL or workloads of its own, and what ``run`` raises.
    """
    if options.url is not None or options.workloads:
        raise ConfigError("--capacity measures this machine; leave --url and --workload out")
    measured = await run(dataclasses.replace(options, workloads=(_INPUT, _OUTPUT)))
    medians = {line.workload: line.median for line in measured.lines}
    if set(medians) != {_INPUT, _OUTPUT} or measured.info is None:
        raise MeasurementError("the server did not say what it is; measure again")
    capacity = Capacity(
        input_tokens_per_second=medians[_INPUT], output_tokens_per_second=medians[_OUTPUT]
    )
    path = capacity_path()
    name = name_of(options.model)
    CapacityFile(path).put(name, options.dtype, measured.info.threads, capacity)
    return CapacityReport(measured=measured, capacity=capacity, path=str(path))
