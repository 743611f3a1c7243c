"""What this machine has: processor, devices, memory, threads, signals."""
