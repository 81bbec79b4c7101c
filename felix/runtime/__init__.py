"""What a process takes from its machine and cannot compute: time, chance, threads. One port, a real one behind it."""
