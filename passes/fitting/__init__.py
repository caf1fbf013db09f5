"""Plan, emit, measure, and again: until what is measured is within the budget."""
