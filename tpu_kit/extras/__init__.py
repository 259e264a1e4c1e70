"""Optional capabilities, with one folder per capability.

No room imports this room: `config.registry` names its commands, objectives and public names. If a folder is missing,
only its names are gone. A folder imports other rooms, but no other folder of this room.
"""
