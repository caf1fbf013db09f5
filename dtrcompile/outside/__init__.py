"""What runs outside of the compiled graphs, and what is held there."""
