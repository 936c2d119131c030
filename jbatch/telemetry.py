"""What the engine tells of itself: one frozen snapshot, cheap to take. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Snapshot:
    """Gauges as of the last step read, and totals since the start. Times in seconds."""

    queued: int = 0
    """Requests on the host, waiting for a slot."""
    waiting: int = 0
    """Requests in a slot that hold no pages."""
    running: int = 0
    """Requests that hold pages."""
    stalled_by_reason: dict[str, int] = field(default_factory=dict)
    """Slots that computed nothing in the last step, by reason."""
    pages_total: int = 0
    """Pages that can be handed out; the reserved page does not count."""
    pages_free: int = 0
    """Pages that no request holds, those with a cached prefix included."""
    pages_cached: int = 0
    """Free pages whose content a request may still share."""
    pages_pinned: int = 0
    """Free pages kept for requests that asked for it."""
    running_limit: int = 0
    """Most requests that may run now."""
    chunk_limit: int = 0
    """Most prefill rows in a step now."""
    step_seconds: float = 0.0
    """Time of a step, averaged over the last few."""

    steps: int = 0
    decode_tokens: int = 0
    """Tokens computed in decode rows."""
    prefill_tokens: int = 0
    """Tokens computed in chunk rows."""
    computed_rows: int = 0
    """Token rows computed, padding included."""
    output_tokens: int = 0
    finished: int = 0
    """Requests that ended at a stop token or a limit."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Tokens of requests as they started for the first time."""
    prefix_hits: int = 0
    """Tokens of those that were in the prefix cache."""
    recomputed_tokens: int = 0
    """Tokens computed again after their request had lost its pages."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Step shapes ready to use, as (decode rows, chunk rows)."""
    host_seconds: float = 0.0
    """Time the engine's thread spent dispatching steps."""
    wait_seconds: float = 0.0
    """Time the engine's thread spent waiting for the device."""

    @property
    def padding_share(self) -> float:
        """Share of computed token rows that held no token; 0 before the first step."""
        if not self.computed_rows:
            return 0.0
        return 1 - (self.decode_tokens + self.prefill_tokens) / self.computed_rows
