"""Shapes of looped language models, and what follows from them by arithmetic."""
