"""How many examples a test of a property draws."""

share = 1.0
"""Of the examples of every test; conftest.py makes it a tenth for `make test`."""


def examples(number):
    """So many examples, or as many of them as are drawn in this run."""
    return max(1, round(number * share))
