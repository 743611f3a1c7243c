"""What a request means and how its record looks (docs/contract.md)."""
