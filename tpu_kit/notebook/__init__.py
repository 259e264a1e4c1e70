"""What notebooks call: parameters, displays, the live view, and runs of notebooks without a browser.

Offers `cells`, `charts`, `runner` and `sweep`.
Must not compute what it shows.
"""
