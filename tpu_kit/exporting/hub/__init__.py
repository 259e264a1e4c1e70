"""The Hugging Face hub: a run's result and its checkpoints, each push one commit.

Offers `publish` and `checkpoint_uploads` for runs; `repository` is one repository of the hub.
Must not know how a format is written: `export` does.
"""
