"""Since when this process runs our commands, and nothing else."""

__all__ = ["began"]

# Seconds since 1970, before any other module of the package was read; None in programs
# of others, who may have changed a function of ours.
began: float | None = None
