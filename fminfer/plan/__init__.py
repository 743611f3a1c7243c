"""What a run will be, from its options, its model and the machine."""
