"""Programs, plans and the referee. Nothing here imports torch."""
