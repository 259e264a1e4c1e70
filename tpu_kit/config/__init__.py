"""The configuration of one run: parameters, rules across them, and how YAML, command line and notebooks set them.

Offers `loader.load_config` and `schema.TrainConfig`; `registry` names the commands, objectives and public names.
Must not know torch, devices or files other than YAML.
"""
