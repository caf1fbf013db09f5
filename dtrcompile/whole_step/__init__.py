"""A training step as one graph, the optimizer's update included."""
