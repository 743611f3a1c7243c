"""Several pipelines as one engine."""
