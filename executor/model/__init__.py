"""Ouro in torch: shapes, weights, checkpoints, the fast path over flat rows, sampling, and the float64
oracle."""
