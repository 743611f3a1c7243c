"""Rows: what each architecture that runs is made of, and where its checkpoints keep that."""
