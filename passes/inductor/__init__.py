"""Inductor: what is lowered by it, what its wrapper holds, and what is replaced in it."""
