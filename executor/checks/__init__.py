"""What checks the executor: audit of addresses, token preservation, comparison with float64."""
