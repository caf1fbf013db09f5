"""The compiler passes: program, plan, replay, heuristics, simulator, planners, capture, emit.

Imported as ``dtrcompile.passes``, never as ``passes``.  Everything up to the planners imports
without torch, so planners run, and are tested, on programs loaded from files.
"""
