"""Functions for the cells of notebooks, and runs of notebooks without a browser.

Offers `cells`, `runner` and `sweep`.
Must not compute results; other folders do.
"""
