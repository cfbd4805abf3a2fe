"""The simulated world: a SimPy device, latency models, sweeps. Never imports torch."""
