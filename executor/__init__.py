"""The real world: Ouro in torch with Triton kernels, driven by the same engine and policies. Never imports
simpy."""
