"""From a program and a budget to a plan. Nothing here imports torch."""
