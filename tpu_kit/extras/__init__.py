"""Capabilities that training, answering and exporting do without, each whole in one folder.

No room imports one: `config.registry` names their commands, objectives and public names. Without its folder these are
gone, and nothing else. A folder imports rooms, and no other folder of this one.
"""
