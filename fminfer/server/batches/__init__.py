"""`/v1/files` and `/v1/batches`: files that clients upload, and their answers."""
