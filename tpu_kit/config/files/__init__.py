"""Files that a configuration is read from: YAML, with the line of every mistake, and files of other trainers.

Offers `strict_yaml` and `other_trainers`, whose table is other_trainers.toml.
Must not know the parameters' bounds: `schema` does.
"""
