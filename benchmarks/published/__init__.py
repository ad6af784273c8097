"""Published results against ours, one row each, with the conditions and the error.

    python -m benchmarks.published [--quick] [--only WORDS] [--jobs N]

Nothing is tuned per row: every constant that is fitted or assumed stands in its row's conditions.
"""
