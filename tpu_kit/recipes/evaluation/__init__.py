"""The command `evaluate`, which judges the answers of a model or of a server.

Offers `command.evaluate` and `server_answers.evaluate_server`.
Must not know how a model answers.
"""
