"""Starts the processes of a run, each in its role."""
