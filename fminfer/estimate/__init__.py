"""What a run will take, without running it: check, bench, costs, a simulator."""
