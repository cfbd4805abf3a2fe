"""What arrives: recorded traces, synthetic processes and shipped presets, as values the engine can run.

Start at `workloads.workload.load_workload`. Imports `policies.core` and nothing else of ours.
"""
