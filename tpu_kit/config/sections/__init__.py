"""Sections with a module of their own, because their values are more than texts and numbers.

Offers `data.DataConfig`, with the sources of a mix, and `preference.PreferenceConfig`.
Must not know other sections: `config.conflicts` has the rules across sections.
"""
