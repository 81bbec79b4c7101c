"""What a process takes from its machine and cannot compute: time, randomness, threads. One port, with a real implementation."""
