"""Many ranks, one warmup: keys are dealt out, built once, loaded everywhere. Nothing here runs inside a model call."""

from fxwarm.ranks.rank import warm_together

__all__ = ["warm_together"]
