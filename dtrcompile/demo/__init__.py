"""The demo: one small GPT trained three times, without a budget and within two.

``python -m dtrcompile demo`` runs `run.run_demo`.  Needs the extra ``dtrcompile[demo]``.
"""
