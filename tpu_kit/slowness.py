"""What makes XLA as slow as a CPU, noticed while training: programs that are compiled again, reads within the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_WINDOWS = 3  # logs in a row that show it: a first evaluation compiles, and a checkpoint reads


class Slowness:
    """Looks at the counters of each log, and says once of each cause that it is there."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def notice(self, before: Mapping[str, int], now: Mapping[str, int], steps: int) -> Iterator[str]:
        """The warnings to print after a log.

        Args:
            before: `Runtime.counters` at its first step.
            now: the same after its last.
            steps: between them.
        """
        grown = {name: now[name] - before.get(name, 0) for name in now}
        if self._again("compiles", grown.get("compiles", 0) > 0):
            yield (
                f"{grown['compiles']} programs were compiled in the last {steps} steps, and some in each log before: "
                "shapes or slices change from step to step, and each change is compiled, for minutes on a TPU. Keep "
                "data.packing=true; in a model's code pass what differs by step as a tensor"
            )
        reads = grown.get("fallbacks", 0) / steps
        if self._again("fallbacks", reads >= 1):
            yield (
                f"the host reads or computes {reads:.0f} values of each step (.item(), print, a condition on a tensor, "
                "or an operation that XLA lacks), and the device waits for each. Take it out of the model's code or "
                "function; what is logged is read every tracking.logging_steps alone"
            )

    def _again(self, cause: str, there: bool) -> bool:
        self._seen[cause] = self._seen.get(cause, 0) + 1 if there else 0
        return self._seen[cause] == _WINDOWS
