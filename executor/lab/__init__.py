"""What measures the executor and does not serve: benches, tuning, profiles, the profiler's window."""
