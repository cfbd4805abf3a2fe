"""Who holds K/V blocks, ring slots and a place among the running: ledgers, admission, preemption,
prefixes."""
