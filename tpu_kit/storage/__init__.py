"""Files in folders and object stores.

Offers `object_store.ObjectFolder` and `output_location`, which chooses where a run writes.
Must not know what the files contain.
"""
