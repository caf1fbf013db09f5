"""Between FX graphs and programs: what is captured, emitted, verified and run eagerly."""
