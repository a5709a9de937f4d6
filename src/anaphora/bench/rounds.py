"""Runs workloads against one or several systems, a repeat of everything before the next one.

What changes slowly on a machine then changes for all workloads and all systems alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from anaphora.bench.workloads import Client, Prompts, Sample, Workload

CACHING_ON, CACHING_OFF = "caching on", "caching off"  # our own server, twice

# workload's name → system → one sample for each repeat
Samples = dict[str, dict[str, list[Sample]]]
Plan = Sequence[tuple[Workload, Mapping[str, Client]]]
Notice = Callable[[str], None]


class Rounds:
    """Prompts for every repeat of every workload, the same for all systems."""

    def __init__(self, *, seed: int, vocab_size: int, repeats: int, notice: Notice) -> None:
        self.repeats = repeats
        self.notice = notice  # told what runs next
        self._seed = seed
        self._vocab_size = vocab_size

    def prompts(self, name: str, repeat: int | str) -> Prompts:
        """Fresh ones for ``repeat`` of the workload ``name``."""
        return Prompts(self._vocab_size, self._seed, name, repeat)

    async def run(self, plan: Plan) -> Samples:
        """Warm-ups, then all repeats. Raises ``MeasurementError``."""
        for workload, systems in plan:
            for system, client in systems.items():
                self.notice(f"warm-up of {workload.name}, {system}")
                await workload.smaller().measure(client, self.prompts(workload.name, "warm-up"))
        samples: Samples = {workload.name: defaultdict(list) for workload, _ in plan}
        for repeat in range(self.repeats):
            for workload, systems in plan:
                for system, client in systems.items():
                    self.notice(f"{workload.name}, {system}, {repeat + 1} of {self.repeats}")
                    prompts = self.prompts(workload.name, repeat)
                    samples[workload.name][system].append(await workload.measure(client, prompts))
        return samples
