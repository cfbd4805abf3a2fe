"""Config files and sweep grids: read, checked, resolved."""
