"""Programs, models and ways to measure them, for the tests and the benchmarks alike.

Not part of the package, and not installed.  A module imports `dtrcompile` and others of this
folder; tests and benchmarks import it, and not one another (docs/layout.md has the rule).
"""
