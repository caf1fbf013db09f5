"""One budget over a training step of several graphs: who may hold how much, and when."""
