"""A row for each family: its config as a spec, and where its tensors are."""
