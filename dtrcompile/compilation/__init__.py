"""Compiling one Dynamo graph: planning it, then Inductor or the eager executor, then its report."""
