"""Pictures of rows: where they are, their sizes and tokens, rows that hold at most K of them, and their pixels.

Preparing reads the headers of pictures, never pixels; batches are decoded as they are made. Only runs with
model.images=true import this folder. It knows nothing of devices.
"""
