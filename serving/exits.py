"""Exit codes of `python -m serving`."""

from enum import IntEnum


class Exit(IntEnum):
    """Why the process ended."""

    DRAINED = 0
    """In order: every request was answered."""
    FAILED = 1
    """Start-up or the server itself failed."""
    USAGE = 2
    """A flag or the checkpoint cannot be used."""
    DRAIN_TIMED_OUT = 3
    """Requests still ran when the time to finish them was over; each was told."""
    DEVICE_LOST = 4
    """A fault of the devices ended the engine."""
    WATCHDOG = 5
    """A device call did not come back."""
