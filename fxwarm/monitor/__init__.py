"""Nothing JITs after warmup: the monitor, what tells it, and what it tells."""

from fxwarm.monitor.session import Seen, events, no_jit, report, stop_process, watch_process

__all__ = ["Seen", "events", "no_jit", "report", "stop_process", "watch_process"]
