"""The Hugging Face hub: pushes a run's result and its checkpoints; every push is a single commit.

Offers `publish` and `checkpoint_uploads` for runs; `repository` has the access to a repository.
Must not know how a format is written: `export` does.
"""
