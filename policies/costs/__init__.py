"""What batches cost: ceilings of cards, physical limits, features and the latency models by name."""
