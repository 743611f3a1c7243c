"""A run over lines: each is opened once, put in good order, and answered by an engine."""
