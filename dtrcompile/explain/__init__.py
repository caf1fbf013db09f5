"""What a plan does with each tensor, and why, as text, as JSON, as a page and for other viewers.

`explanation.explain` makes an `Explanation` of a program, its plan and the compiler's schedule; the
other modules write it in the forms that people use.
"""
