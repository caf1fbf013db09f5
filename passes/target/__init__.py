"""Planning for a GPU that is not there."""
