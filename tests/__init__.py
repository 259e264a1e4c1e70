"""The tests. A package, for older IPython has a package `tests` too, which would come before a folder."""
