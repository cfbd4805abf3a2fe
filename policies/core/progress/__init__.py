"""How far prompts and requests have come: frontiers and states, owned by the scheduler and read by
policies."""
