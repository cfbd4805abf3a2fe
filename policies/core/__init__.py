"""The engine room both worlds share: requests, frontiers, ledgers, the scheduler and its generator loop.
Standard library only."""
