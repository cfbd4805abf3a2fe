"""How far a simulated run, or a set of them, is from the measured one: pairs, figures, batches, requests,
ranks."""
