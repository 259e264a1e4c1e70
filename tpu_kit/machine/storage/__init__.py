"""Reads and writes files in folders and object stores.

Offers `object_store.ObjectFolder`, `local_folder.LocalFolder` and `output_location`, which chooses where a run writes.
Must not know the contents of the files.
"""
