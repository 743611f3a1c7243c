"""What to compute next: scheduling, KV blocks, the prefix cache, answers."""
