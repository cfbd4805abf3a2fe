"""The loop, the scheduler and what they write down: driven by events, reading no clock."""
