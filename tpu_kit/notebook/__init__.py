"""Functions for the cells of notebooks, and runs of notebooks without a browser.

Offers `cells` and `runner`.
Must not compute results; other folders do.
"""
