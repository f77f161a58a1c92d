"""What each command of the command line does: a function from parsed arguments to an exit status."""

DONE, INCOMPLETE, FAILED = 0, 1, 2
"""Exit statuses: done and complete; done, but something is a gap, missing or different; could not run."""
