"""The command `evaluate`, and the servers whose answers it judges in place of a model's.

Offers `command.evaluate` and `server_answers.evaluate_server`.
Must not know how a model answers.
"""
