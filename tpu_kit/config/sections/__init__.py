"""Sections of a run that have a module of their own, as their values are more than texts and numbers.

Offers `data.DataConfig`, with the sources of a mix.
Must not know other sections: rules across them are those of `config.conflicts`.
"""
