"""The menu: one file per policy, all of them listed in `policies.registry`. `policies.core` is the engine
room."""
